"""Importance ratios between policies: the behaviour that a token is assigned, and the tokens that are dropped because
of their ratio.

pi is the policy in training, mu the actors' policy (its logprobs come with the episode), prox the policy as the step
began. N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import torch
from torch import Tensor

from learner.objective.loss_records import Dropped, Tokens
from learner.vtrace import segment_max, segment_mean
from shared.config.objective_section import ObjectiveConfig


def corrected(tokens: Tokens, config: ObjectiveConfig) -> Tokens:
    """Return the tokens for the objective. With correction `none`, they count as sampled by prox (without prox: by pi
    itself), as if the policy had not changed since."""
    if config.correction == "importance":
        return tokens
    sampler_N = tokens.logprobs if tokens.proximal_logprobs is None else tokens.proximal_logprobs
    return replace(tokens, behaviour_logprobs=sampler_N.detach())


def dropped(tokens: Tokens, config: ObjectiveConfig) -> Dropped | None:
    """Return the tokens that take no part in the loss (masked importance sampling); None if the recipe masks nothing.

    The ratio is prox/mu, or pi/mu without prox. `mask_token_ratio` drops tokens outside of its bounds (IcePop: Ling
    Team, 2025); `mask_sequence_ratio` drops episodes whose geometric mean of ratios is outside of its bounds, and
    `mask_veto_ratio` drops episodes with any ratio below it (masked importance sampling: Liu et al., 2025, "When speed
    kills stability").
    """
    if config.mask_token_ratio is None and config.mask_sequence_ratio is None and config.mask_veto_ratio is None:
        return None
    own_N = tokens.logprobs if tokens.proximal_logprobs is None else tokens.proximal_logprobs
    log_ratios_N = (own_N - tokens.behaviour_logprobs).detach()
    means_N = segment_mean(log_ratios_N, tokens.episode_end)
    vetoed_N = torch.zeros_like(tokens.episode_end)
    if config.mask_veto_ratio is not None:
        vetoed_N = -segment_max(-log_ratios_N, tokens.episode_end) < log(config.mask_veto_ratio)
    return Dropped(
        _outside(log_ratios_N, config.mask_token_ratio), _outside(means_N, config.mask_sequence_ratio), vetoed_N
    )


def _outside(log_ratios_N: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    if bounds is None:
        return torch.zeros_like(log_ratios_N, dtype=torch.bool)
    low, high = bounds
    return (log_ratios_N < log(low)) | (log_ratios_N > log(high))
