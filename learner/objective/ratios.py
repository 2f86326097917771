"""Ratios of policies: what behaviour a token is taken to have, and which tokens are left out for their ratio.

pi is the policy in training, mu the actors' (whose logprobs come with the episode), prox the policy as the step began.
N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import torch
from torch import Tensor

from learner.objective.records import Dropped, Tokens
from learner.vtrace import segment_max, segment_mean
from shared.settings.objective import ObjectiveConfig


def corrected(tokens: Tokens, config: ObjectiveConfig) -> Tokens:
    """What objectives see: with correction `none`, tokens that prox has sampled (pi itself, where there is no prox), as
    if the policy had not moved on since."""
    if config.correction == "importance":
        return tokens
    own = tokens.logprobs if tokens.proximal_logprobs is None else tokens.proximal_logprobs
    return replace(tokens, behaviour_logprobs=own.detach())


def dropped(tokens: Tokens, config: ObjectiveConfig) -> Dropped | None:
    """Which tokens take no part in the loss: masked importance sampling. None where the recipe masks nothing.

    The ratio is prox/mu, or pi/mu without prox. `mask_token_ratio` drops tokens outside of its bounds (IcePop: Ling
    Team, 2025); `mask_sequence_ratio` episodes whose ratios' geometric mean is outside, `mask_veto_ratio` episodes with
    any ratio below it (masked importance sampling: Liu et al., 2025, "When speed kills stability").
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
