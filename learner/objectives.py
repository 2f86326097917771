"""Objectives over sampled tokens: pure functions of a record of tokens, each one scalar, divided once.

Every policy loss is the same gradient, -w A grad(log pi), summed over tokens, and objectives differ in A and in w:

    objective  A                  ratio            w
    vtrace     q - V (V-trace)    token or turn    min(pg_rho_bar, ratio), 0 where clipped (only with vtrace_clip)
    grpo       group-relative     token            min(pg_rho_bar, ratio), 0 where clipped
    gspo       group-relative     whole episode    min(pg_rho_bar, ratio), 0 where clipped
    cispo      group-relative     token            ratio held inside [1 - clip_low, 1 + clip_high], never 0

The ratio pi/mu is to the behaviour logprobs of the wire. DAPO (Yu et al., 2025) is `grpo` with clip_high > clip_low,
aggregation `token_mean`, dynamic sampling and overlong episodes masked or penalised. Shape suffixes: N = sampled tokens
of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from learner.vtrace import TokenTargets, segment_mean, token_vtrace, turn_vtrace
from shared.learner_config import ObjectiveConfig


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Sampled tokens of whole episodes, one after another; all [N]. The first three are differentiable."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    behaviour_logprobs: Tensor
    rewards: Tensor  # a turn's reward at its last token
    turn_end: Tensor  # bool
    episode_end: Tensor  # bool
    advantages: Tensor  # relative to the group
    weights: Tensor  # of each token in the sums: 1 (token mean), or 1 / tokens of its episode (sequence mean)
    reference_logprobs: Tensor | None = None  # of the frozen initial policy


def corrected(tokens: Tokens, config: ObjectiveConfig) -> Tokens:
    """What objectives see: with correction `none`, tokens whose ratio pi/mu is 1, as if the policy had not moved on."""
    if config.correction == "importance":
        return tokens
    return replace(tokens, behaviour_logprobs=tokens.logprobs.detach())


class Loss(NamedTuple):
    """`total`: the scalar to differentiate, not yet divided. The others are detached, [N]."""

    total: Tensor
    policy_N: Tensor  # each token's policy term
    clipped_N: Tensor  # bool: the clip removed the gradient
    kl_N: Tensor  # estimates of KL(pi, reference); 0 without one
    advantages_N: Tensor  # before any weight
    vs_N: Tensor  # the value's targets
    value_weights_N: Tensor  # of each token in the value's term; their mean is 1


class PolicyTerm(NamedTuple):
    loss_N: Tensor
    clipped_N: Tensor  # bool, true where the clip removed the gradient


def policy_term(
    logprobs_N: Tensor,
    log_ratios_N: Tensor,
    advantages_N: Tensor,
    *,
    max_weight: float | None = None,
    clip: tuple[float, float] | None = None,
    dual_clip: float | None = None,
) -> PolicyTerm:
    """-w A log pi per token, with w = min(max_weight, ratio), and w = 0 where clipped. Gradient to logprobs only.

    This is the gradient of PPO's min(ratio A, clip(ratio) A) (Schulman et al., 2017, equation 7), with bounds of its
    own on each side (DAPO, equation 8), and of the dual clip max(., c A) for A < 0 (Ye et al., 2020, equation 5).

    Args:
        logprobs_N: log pi of the sampled tokens, differentiable.
        log_ratios_N: log of pi/mu, of the token or of whatever it is part of; no gradient flows into it.
        advantages_N: of each token; no gradient flows into it.
        max_weight: truncation of the importance weight; None = none.
        clip: (low, high): no gradient beyond [1 - low, 1 + high] where the advantage pushes further out; None = none.
        dual_clip: no gradient where A < 0 and the ratio exceeds it; None = none.
    """
    ratios_N = log_ratios_N.detach().exp()
    weights_N = ratios_N if max_weight is None else ratios_N.clamp(max=max_weight)
    clipped_N = torch.zeros_like(ratios_N, dtype=torch.bool)
    if clip is not None:
        low, high = clip
        clipped_N = torch.where(advantages_N > 0, ratios_N > 1 + high, (advantages_N < 0) & (ratios_N < 1 - low))
    if dual_clip is not None:
        clipped_N = clipped_N | ((advantages_N < 0) & (ratios_N > dual_clip))
    weights_N = weights_N.masked_fill(clipped_N, 0.0)
    return PolicyTerm(-(weights_N * advantages_N).detach() * logprobs_N, clipped_N)


def kl_term(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(pi, reference) from tokens of pi (Schulman, 2020, "Approximating KL divergence"), [N].

    With l = log pi - log reference: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l. k2 and k3 are differentiated as they
    stand. The plain derivative of k1 has mean 0, so k1 has the value l and the gradient of the KL: l grad log pi.
    """
    difference_N = logprobs_N - reference_logprobs_N.detach()
    match estimator:
        case "k1":
            return difference_N.detach() * (1 + logprobs_N - logprobs_N.detach())
        case "k2":
            return 0.5 * difference_N.square()
        case _:
            return torch.expm1(-difference_N) + difference_N


def value_term(values_N: Tensor, vs_N: Tensor, clip: float | None) -> Tensor:
    """(V - vs)^2 / 2 per token; errors beyond `clip` count linearly (Huber), so that none pulls harder than `clip`."""
    error_N = values_N - vs_N.detach()
    if clip is None:
        return 0.5 * error_N.square()
    inside_N = error_N.abs().clamp(max=clip)
    return inside_N * (error_N.abs() - 0.5 * inside_N)


def vtrace(tokens: Tokens, config: ObjectiveConfig, scale: float = 1.0) -> Loss:
    """Actor-critic with V-trace targets (Espeholt et al., 2018, section 4.2): policy + value_coef value term.

    `scale` multiplies the advantages. At the level of turns, the critic learns at the first token of each turn, where
    the turn is chosen, with the weight of all its tokens.
    """
    log_rhos_N = (tokens.logprobs - tokens.behaviour_logprobs).detach()
    targets = token_vtrace if config.vtrace_level == "token" else turn_vtrace
    levels = {} if config.vtrace_level == "token" else {"ratio": config.turn_ratio}
    got = targets(
        log_rhos_N,
        tokens.rewards,
        tokens.values.detach(),
        tokens.turn_end,
        tokens.episode_end,
        gamma=config.gamma,
        lam=config.lam,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        **levels,
    )
    clip = (config.clip_low, config.clip_high) if config.vtrace_clip else None
    dual = config.dual_clip if config.vtrace_clip else None
    term = policy_term(
        tokens.logprobs, got.log_rhos, got.advantages * scale, max_weight=config.pg_rho_bar, clip=clip, dual_clip=dual
    )
    value_weights_N = tokens.weights * got.value_weights
    value = (value_weights_N * value_term(tokens.values, got.vs, config.value_clip)).sum()
    return _loss(tokens, config, term, got.advantages, got, config.value_coef * value)


def grpo(tokens: Tokens, config: ObjectiveConfig, scale: float = 1.0) -> Loss:
    """Group-relative policy gradient (Shao et al., 2024, equation 3) with truncated importance weights per token."""
    return _group_relative(tokens, config, tokens.logprobs - tokens.behaviour_logprobs)


def gspo(tokens: Tokens, config: ObjectiveConfig, scale: float = 1.0) -> Loss:
    """One ratio an episode, the geometric mean of its tokens' (GSPO: Zheng et al., 2025, equations 5 to 7).

    With aggregation `sequence_mean` it is the paper's objective; its clip range is much narrower than a token's, of the
    order of 3e-4.
    """
    log_ratios_N = (tokens.logprobs - tokens.behaviour_logprobs).detach()
    return _group_relative(tokens, config, segment_mean(log_ratios_N, tokens.episode_end))


def cispo(tokens: Tokens, config: ObjectiveConfig, scale: float = 1.0) -> Loss:
    """The importance weight is clipped, no token loses its gradient (MiniMax-M1, 2025, equations 4 and 5)."""
    ratios_N = (tokens.logprobs - tokens.behaviour_logprobs).detach().exp()
    held_N = ratios_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    term = policy_term(tokens.logprobs, held_N.log(), tokens.advantages)
    return _loss(tokens, config, PolicyTerm(term.loss_N, held_N != ratios_N), tokens.advantages)


Objective = Callable[[Tokens, ObjectiveConfig, float], Loss]
OBJECTIVES: dict[str, Objective] = {"vtrace": vtrace, "grpo": grpo, "gspo": gspo, "cispo": cispo}


def _group_relative(tokens: Tokens, config: ObjectiveConfig, log_ratios_N: Tensor) -> Loss:
    clip = (config.clip_low, config.clip_high)
    limits = {"max_weight": config.pg_rho_bar, "dual_clip": config.dual_clip}
    term = policy_term(tokens.logprobs, log_ratios_N, tokens.advantages, clip=clip, **limits)
    return _loss(tokens, config, term, tokens.advantages)


def _loss(
    tokens: Tokens,
    config: ObjectiveConfig,
    term: PolicyTerm,
    advantages_N: Tensor,
    targets: TokenTargets | None = None,
    value: Tensor | float = 0.0,
) -> Loss:
    """The sum over tokens of policy term, KL and entropy, and the value's sum."""
    per_token_N = term.loss_N
    kl_N = torch.zeros_like(tokens.logprobs)
    if tokens.reference_logprobs is not None:
        kl_N = kl_term(tokens.logprobs, tokens.reference_logprobs, config.kl_estimator)
        per_token_N = per_token_N + config.kl_coef * kl_N
    if config.entropy_coef:
        per_token_N = per_token_N - config.entropy_coef * tokens.entropies
    vs_N, value_weights_N = tokens.values.detach(), torch.ones_like(tokens.values)
    if targets is not None:
        vs_N, value_weights_N = targets.vs, targets.value_weights
    total = (tokens.weights * per_token_N).sum() + value
    return Loss(total, term.loss_N.detach(), term.clipped_N, kl_N.detach(), advantages_N, vs_N, value_weights_N)
