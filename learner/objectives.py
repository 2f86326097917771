"""Losses over sampled tokens: pure functions, one scalar each, divided once by the global number of trained tokens.

Shape suffixes: N = sampled tokens of one microbatch, G = episodes of one group.

Every policy loss is the same gradient, -w A grad(log pi), and differs in A and in the weight w: the truncated
importance weight min(w_max, pi/mu), which a clip sets to 0 where the ratio has already left [1 - low, 1 + high] in
the direction that the advantage pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Loss(NamedTuple):
    """`total`: the scalar to differentiate. `policy_N`: each token's policy term, detached. `clipped_N`: bool."""

    total: Tensor
    policy_N: Tensor
    clipped_N: Tensor


class PolicyTerm(NamedTuple):
    loss_N: Tensor
    clipped_N: Tensor  # bool, true where the clip removed the gradient


def group_advantages(rewards_G: Sequence[float], *, divide_by_std: bool = True, std_floor: float = 1e-6) -> np.ndarray:
    """Rewards relative to their group, float64 [G]: exactly 0 when all rewards are equal, whatever their value."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.size == 0 or (rewards == rewards[0]).all():
        return np.zeros_like(rewards)
    advantages = rewards - rewards.mean()
    return advantages / max(float(rewards.std()), std_floor) if divide_by_std else advantages


def policy_term(
    logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    max_weight: float | None = None,
    clip: tuple[float, float] | None = None,
) -> PolicyTerm:
    """-w A log pi per token, with w = min(max_weight, pi/mu), and w = 0 where clipped. Gradient to logprobs only.

    Args:
        logprobs_N: log pi of the sampled tokens, differentiable.
        behaviour_logprobs_N: log mu, as recorded when the tokens were sampled.
        advantages_N: of each token; no gradient flows into it.
        max_weight: truncation of the importance weight; None = none.
        clip: (low, high); None = no clip.
    """
    ratios_N = (logprobs_N.detach() - behaviour_logprobs_N).exp()
    weights_N = ratios_N if max_weight is None else ratios_N.clamp(max=max_weight)
    clipped_N = torch.zeros_like(ratios_N, dtype=torch.bool)
    if clip is not None:
        low, high = clip
        clipped_N = torch.where(advantages_N > 0, ratios_N > 1 + high, (advantages_N < 0) & (ratios_N < 1 - low))
        weights_N = weights_N.masked_fill(clipped_N, 0.0)
    return PolicyTerm(-(weights_N * advantages_N).detach() * logprobs_N, clipped_N)


def vtrace_loss(
    logprobs_N: Tensor,
    entropies_N: Tensor,
    values_N: Tensor,
    behaviour_logprobs_N: Tensor,
    advantages_N: Tensor,
    vs_N: Tensor,
    *,
    num_tokens: int,
    value_coef: float,
    entropy_coef: float,
    max_weight: float | None = 1.0,
    clip: tuple[float, float] | None = None,
) -> Loss:
    """Actor-critic with V-trace targets: policy term + value_coef/2 (V - vs)^2 - entropy_coef H.

    `advantages_N` is q - V, not yet weighted: `max_weight` is the paper's rho bar of the policy gradient.
    """
    term = policy_term(logprobs_N, behaviour_logprobs_N, advantages_N, max_weight=max_weight, clip=clip)
    value = 0.5 * (values_N - vs_N.detach()).square().sum()
    total = (term.loss_N.sum() + value_coef * value - entropy_coef * entropies_N.sum()) / num_tokens
    return Loss(total, term.loss_N.detach(), term.clipped_N)


def grpo_loss(
    logprobs_N: Tensor,
    entropies_N: Tensor,
    behaviour_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    num_tokens: int,
    entropy_coef: float,
    clip: tuple[float, float],
    max_weight: float | None = None,
) -> Loss:
    """Group-relative policy gradient with truncated importance weights and an asymmetric clip; no value function."""
    term = policy_term(logprobs_N, behaviour_logprobs_N, advantages_N, max_weight=max_weight, clip=clip)
    total = (term.loss_N.sum() - entropy_coef * entropies_N.sum()) / num_tokens
    return Loss(total, term.loss_N.detach(), term.clipped_N)
