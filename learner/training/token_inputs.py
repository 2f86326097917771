"""The inputs of objectives: from a microbatch and the outputs of policy and reference to columns of tokens.

N = sampled tokens of a microbatch, W = those of its whole episodes, if it has pieces of some; else N.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.batch.microbatch import Microbatch
from learner.model.policy import PolicyOutput
from learner.objective.loss_records import Tokens
from learner.objective.loss_terms import hold_term

NOTHING: Mapping[str, Tensor] = {}


def make_tokens(
    batch: Microbatch,
    output: PolicyOutput,
    reference: PolicyOutput | None,
    proximal_N: Tensor | None,
    weights_N: Tensor,
    others: Mapping[str, Tensor] = NOTHING,
) -> Tokens:
    """Return the columns of a microbatch's sampled tokens. If it has pieces, these are the columns of the whole
    episodes, [W], in which the other pieces have no gradient and no weight.

    `output`: of the policy in training. `reference`: None if there is none or its logprobs were computed before the
    step's first update. `proximal_N`: logprobs of the policy as the step began. `weights_N`: weight of each token in
    the loss. `others`: values float32 [W] that are known of the other pieces, by the name of the column.
    """
    hold = None
    if reference is not None and reference.labels is not None and output.label_logprobs is not None:
        hold = hold_term(output.logprobs, reference.labels, output.label_logprobs)
    whole = batch.whole

    def filled(name: str, values_N: Tensor | None) -> Tensor | None:
        if whole is None or values_N is None:
            return values_N
        unknown = whole.behaviour_logprobs if name.endswith("logprobs") else torch.zeros_like(whole.rewards)
        return others.get(name, unknown).to(values_N.dtype).index_put((whole.own,), values_N)

    columns = {
        "logprobs": output.logprobs,
        "entropies": output.entropies,
        "values": output.values,
        "advantages": batch.advantages,
        "weights": weights_N,
        "reference_logprobs": batch.reference_logprobs if reference is None else reference.logprobs,
        "reference_entropies": None if reference is None else reference.entropies,
        "proximal_logprobs": proximal_N,
        "teacher_logprobs": batch.teacher_logprobs,
        "teacher_baselines": batch.teacher_baselines,
        "hold": hold,
    }
    known = batch if whole is None else whole
    return Tokens(
        **{name: filled(name, values_N) for name, values_N in columns.items()},  # type: ignore[arg-type]
        behaviour_logprobs=known.behaviour_logprobs,
        rewards=known.rewards,
        turn_end=known.turn_end,
        episode_end=known.episode_end,
    )
