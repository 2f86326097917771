"""From a microbatch and what policies say of it to the columns that objectives take."""

from __future__ import annotations

from torch import Tensor

from learner.batch import Microbatch
from learner.model.policy import PolicyOutput
from learner.objective.records import Tokens
from learner.objective.terms import hold_term


def tokens_of(
    batch: Microbatch, output: PolicyOutput, said: PolicyOutput | None, proximal_N: Tensor | None, weights_N: Tensor
) -> Tokens:
    """`output`: of the policy in training; `said`: of the reference, None where it was asked before the step's first
    update or there is none; `weights_N`: of each token in the loss."""
    hold = None
    if said is not None and said.labels is not None and output.label_logprobs is not None:
        hold = hold_term(output.logprobs, said.labels, output.label_logprobs)
    return Tokens(
        logprobs=output.logprobs,
        entropies=output.entropies,
        values=output.values,
        behaviour_logprobs=batch.behaviour_logprobs,
        rewards=batch.rewards,
        turn_end=batch.turn_end,
        episode_end=batch.episode_end,
        advantages=batch.advantages,
        weights=weights_N,
        reference_logprobs=batch.reference_logprobs if said is None else said.logprobs,
        reference_entropies=None if said is None else said.entropies,
        proximal_logprobs=proximal_N,
        hold=hold,
    )
