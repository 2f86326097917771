"""What a checkpoint holds of a trainer."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

from learner.distributed import Ranks
from learner.model.policy import Policy
from learner.trainer import Trainer

SCHEMA = 2


def fingerprint(policy: Policy) -> str:
    """Names and shapes of all parameters, as 16 hex digits: the same for any number of ranks and any values."""
    shapes = sorted(f"{name}{list(p.shape)}" for name, p in policy.named_parameters())
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def training_state(trainer: Trainer) -> dict[str, Any]:
    on_gpu = trainer.ranks.device.type == "cuda"
    options = StateDictOptions(cpu_offload=on_gpu and trainer.config.checkpoint.in_background)
    model, optimizer = get_state_dict(trainer.policy, trainer.optimizer, options=options)
    state = {"model": model, "optimizer": optimizer}
    if trainer.config.objective.kl_reference_every:
        assert trainer.reference is not None
        state["reference"] = get_model_state_dict(trainer.reference, options=options)
    return state


def rng_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state
