"""The inputs of objectives: from a microbatch and the outputs of policy and reference to columns of tokens."""

from __future__ import annotations

from torch import Tensor

from learner.batch.microbatch import Microbatch
from learner.model.policy import PolicyOutput
from learner.objective.loss_records import Tokens
from learner.objective.loss_terms import hold_term


def make_tokens(
    batch: Microbatch,
    output: PolicyOutput,
    reference: PolicyOutput | None,
    proximal_N: Tensor | None,
    weights_N: Tensor,
) -> Tokens:
    """Return the columns of a microbatch's sampled tokens.

    `output`: of the policy in training. `reference`: None if there is none or its logprobs were computed before the
    step's first update. `proximal_N`: logprobs of the policy as the step began. `weights_N`: weight of each token in
    the loss.
    """
    hold = None
    if reference is not None and reference.labels is not None and output.label_logprobs is not None:
        hold = hold_term(output.logprobs, reference.labels, output.label_logprobs)
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
        reference_logprobs=batch.reference_logprobs if reference is None else reference.logprobs,
        reference_entropies=None if reference is None else reference.entropies,
        proximal_logprobs=proximal_N,
        hold=hold,
    )
