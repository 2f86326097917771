"""The cases that test_learner_ranks.py compares between numbers of ranks: settings of the learner, and groups of a
step."""

from __future__ import annotations

from typing import Any

from tests.support.small.families import FAMILIES

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "vtrace": ({}, 3),
    "empty_shard": ({}, 0),  # only one episode, of text, for two ranks
    "grpo": ({"objective": "grpo", "entropy_coef": 0.0, "group_size": 2}, 3),
    "uneven": ({"microbatch_tokens": 400, "max_grad_norm": 1e-3, "normalize_advantages": False}, 2),
    "muon": ({"optimizer": "muon"}, 3),
    "reference": ({"kl_coef": 0.5, "objective": "grpo"}, 3),
    "frozen": ({"freeze": ("vision", "projector"), "hold_coef": 0.5, "hold_probability": 0.6}, 2),
    "frozen_layers": (
        {"freeze": ("vision", "projector"), "freeze_layers": 1, "critic_width": 16}
        | {"hold_coef": 0.5, "hold_probability": 0.6, "microbatch_tokens": 400},
        2,
    ),
    "experts": ({"activation_checkpointing": True}, 2),  # uses the mixture of experts beside the model
    "updates": ({"passes": 2, "minibatches": 2, "critic_width": 16, "activation_checkpointing": True}, 3),
    "ppo": ({"objective": "ppo", "proximal": "learner", "minibatches": 2, "mask_token_ratio": (0.03, 2.0)}, 3),
    "refreshed": (
        {"kl_coef": 0.5, "objective": "grpo", "kl_reference_every": 1, "kl_in_reward": True, "divide_by_std": False},
        3,
    ),
    "gspo": ({"objective": "gspo", "aggregation": "sequence_mean", "pg_rho_bar": None}, 3),
    "sft": ({"objective": "sft", "entropy_coef": 0.0}, 2),
    "teacher": ({"objective": "grpo", "teacher": "beside", "reward_weight": 0.5, "entropy_coef": 0.0}, 2),
    "windows": ({}, 2),  # uses the Qwen2.5-VL beside the model, whose tower has windows
    "recurrent": ({}, 2),  # uses the Qwen3.5 beside the model
    "text": ({}, 2),  # uses the Qwen3 beside the model, which has no tower
}
OTHERS = sorted(name for name in FAMILIES if not name.startswith("Qwen"))
"""Families of other makers, each a case that uses the model of its name beside the model."""
CASES |= {name: ({}, 2) for name in OTHERS}
# Three ranks test sizes that are not divisible; the other cases differ from these only in the loss of a token.
OF_THREE = ("vtrace", "empty_shard", "grpo", "uneven", "muon", "experts", "updates")
CASES_OF = {
    1: tuple(CASES),
    2: tuple(name for name in CASES if name not in ("windows", "text", "recurrent", *OTHERS)),
    3: OF_THREE,
}
MODES: dict[str, tuple[int, str, dict[str, Any]]] = {  # (ranks, case, settings); must equal that case on one rank
    "checkpointing": (2, "vtrace", {"activation_checkpointing": True}),
    "offload": (2, "vtrace", {"offload": True}),
    "replicas": (2, "vtrace", {"shard_size": 1}),
    "replicas_of_shards": (4, "vtrace", {"shard_size": 2}),
    "context": (2, "vtrace", {"context": 2}),
    "context_frozen": (2, "frozen", {"context": 2}),
    "context_frozen_layers": (2, "frozen_layers", {"context": 2}),
    "context_experts": (2, "experts", {"context": 2}),
    "context_muon": (2, "muon", {"context": 2}),
    "context_updates": (2, "updates", {"context": 2, "shard_size": 1}),
    "context_4": (4, "frozen", {"context": 4}),
    "context_2_groups": (4, "experts", {"context": 2}),
    "context_offloaded": (2, "vtrace", {"context": 2, "offload": True}),
    "text": (2, "text", {}),
    "recurrent": (2, "recurrent", {}),
    **{name: (2, name, {}) for name in OTHERS},
    **{f"context_{name}": (2, name, {"context": 2}) for name in OTHERS},
    "context_text": (2, "text", {"context": 2}),
    "context_windows": (2, "windows", {"context": 2}),
    "context_4_windows": (4, "windows", {"context": 4}),
}
# Computed in float64: with few tokens, or with the reference's unbounded ratios, float32's rounding of a
# log-probability is more than 1e-6 of the gradient, on one rank as on several.
EXACT: dict[str, tuple[int, str, dict[str, Any]]] = {
    "context_2_shards": (4, "empty_shard", {"context": 2, "shard_size": 2}),
    "context_4_reference": (4, "reference", {"context": 4}),
}
