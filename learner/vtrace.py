"""V-trace (Espeholt et al., 2018, equation 1): off-policy corrected targets for values and policy gradient.

Symbols are the paper's. Shape suffixes: T = time, B = batch, N = sampled tokens of all episodes, one after another,
S = turns of all episodes, one after another. Tensors with S have N entries, of which those after the last turn are 0,
so that the host need not wait for a GPU to count the turns.

    delta_t = rho_t (r_t + gamma_t V_{t+1} - V_t)                      rho_t = min(rho_bar, pi/mu)
    vs_t    = V_t + delta_t + gamma_t c_t (vs_{t+1} - V_{t+1})         c_t   = lambda_t min(c_bar, pi/mu)
    A_t     = q_t - V_t
    q_t     = r_t + gamma_t (lambda_t vs_{t+1} + (1 - lambda_t) V_{t+1})

With lambda = 1 these are the paper's targets; on-policy, vs - V and A are the lambda-return's error (GAE). An action is
a token (`token_vtrace`) or a whole turn (`turn_vtrace`).
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.scan import reverse_scan

MAX_LOG_RHO = 40.0  # larger log ratios count as this: an infinite rho times a temporal difference of 0 is no number


class VTrace(NamedTuple):
    """Targets and advantages, both [T,B], without gradient. `advantages` is q - V, before the policy gradient's weight
    pi/mu."""

    vs: Tensor
    advantages: Tensor


class TokenTargets(NamedTuple):
    """V-trace over sampled tokens; all [N], no gradient."""

    vs: Tensor
    advantages: Tensor
    log_rhos: Tensor  # log(pi/mu) of the token's action, which is the token or its turn
    value_weights: Tensor  # weight of each token in the value loss; their sum is N


@torch.no_grad()
def vtrace(
    log_rhos_TB: Tensor,
    discounts_TB: Tensor,
    rewards_TB: Tensor,
    values_TB: Tensor,
    bootstrap_value_B: Tensor,
    *,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    lambdas: Tensor | float = 1.0,
) -> VTrace:
    """Return V-trace targets of B trajectories of T steps.

    Args:
        log_rhos_TB: log(pi/mu) of the actions taken, pi the learner's policy and mu the actors'.
        discounts_TB: gamma of the step from t to t+1; 0 where the episode ends at t.
        rewards_TB: reward received after the action at t.
        values_TB: V(x_t).
        bootstrap_value_B: V(x_T).
        rho_bar, c_bar: truncation of the importance weights; None = no truncation.
        lambdas: scalar or [T,B], lambda of the step from t to t+1.
    """
    rhos_TB = log_rhos_TB.clamp(max=MAX_LOG_RHO).exp()
    next_values_TB = torch.cat([values_TB[1:], bootstrap_value_B[None]])
    deltas_TB = rhos_TB.clamp(max=inf if rho_bar is None else rho_bar) * (
        rewards_TB + discounts_TB * next_values_TB - values_TB
    )
    cs_TB = lambdas * rhos_TB.clamp(max=inf if c_bar is None else c_bar)
    errors_TB = reverse_scan(discounts_TB * cs_TB, deltas_TB)  # vs - V
    next_errors_TB = torch.cat([errors_TB[1:], torch.zeros_like(errors_TB[:1])])
    q_TB = rewards_TB + discounts_TB * (next_values_TB + lambdas * next_errors_TB)
    return VTrace(values_TB + errors_TB, q_TB - values_TB)


@torch.no_grad()
def token_vtrace(
    log_rhos_N: Tensor,
    rewards_N: Tensor,
    values_N: Tensor,
    turn_end_N: Tensor,
    episode_end_N: Tensor,
    *,
    gamma: float,
    lam: float,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
) -> TokenTargets:
    """Return V-trace targets over the sampled tokens of whole episodes that lie one after another.

    Each token is a step. Discount and lambda are 1 inside a turn, and `gamma` and `lam` from one turn to the next. The
    discount is 0 at the end of an episode: nothing is bootstrapped, whatever ended it.

    Args:
        log_rhos_N, rewards_N, values_N: float [N]; a turn's reward is at its last token, 0 elsewhere.
        turn_end_N, episode_end_N: bool [N], true at the last token of a turn, of an episode.
    """
    one = torch.ones_like(values_N)
    discounts_N = torch.where(episode_end_N, 0.0, torch.where(turn_end_N, gamma * one, one))
    columns = (log_rhos_N[:, None], discounts_N[:, None], rewards_N[:, None], values_N[:, None])
    lambdas = torch.where(turn_end_N, lam * one, one)[:, None]
    vs, advantages = vtrace(*columns, values_N.new_zeros(1), lambdas=lambdas, rho_bar=rho_bar, c_bar=c_bar)
    return TokenTargets(vs[:, 0], advantages[:, 0], log_rhos_N, one)


@torch.no_grad()
def turn_vtrace(
    log_rhos_N: Tensor,
    rewards_N: Tensor,
    values_N: Tensor,
    turn_end_N: Tensor,
    episode_end_N: Tensor,
    *,
    gamma: float,
    lam: float,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    ratio: str = "geometric",
) -> TokenTargets:
    """Return V-trace targets with whole turns as actions: one rho per turn, discount `gamma` and `lam` from one turn to
    the next.

    Arguments are those of `token_vtrace`. The state of a turn is the one in which its first token is chosen: V is read
    and trained only there, with a weight of the number of the turn's tokens. Every token of a turn gets the turn's
    target, advantage and rho.

    `ratio`: "product" of the tokens' ratios is the exact importance weight of the turn, but its variance grows with the
    turn's length; their "geometric" mean (as GSPO uses it for episodes) stays near 1 and so corrects less.
    """
    action_log_rhos_N = turn_ratios(log_rhos_N, turn_end_N, ratio)
    lengths_N = segment_sum(torch.ones_like(log_rhos_N), turn_end_N)
    turn_N, first_N = segment_ids(turn_end_N), segment_start(turn_end_N)
    discounts_N = torch.where(turn_end_N & ~episode_end_N, gamma, torch.zeros_like(values_N))
    chosen_N = (torch.where(first_N, x_N, 0.0) for x_N in (action_log_rhos_N, values_N))
    log_rhos_S1, values_S1, discounts_S1, rewards_S1 = (
        torch.zeros_like(x_N).index_add(0, turn_N, x_N)[:, None] for x_N in (*chosen_N, discounts_N, rewards_N)
    )
    columns = (log_rhos_S1, discounts_S1, rewards_S1, values_S1)
    vs, advantages = vtrace(*columns, values_N.new_zeros(1), lambdas=lam, rho_bar=rho_bar, c_bar=c_bar)
    value_weights_N = lengths_N * first_N
    return TokenTargets(vs[:, 0][turn_N], advantages[:, 0][turn_N], action_log_rhos_N, value_weights_N)


def without_noise(log_rhos_N: Tensor, noise: float) -> Tensor:
    """Return log ratios with those between -noise and noise set to 0.

    If engine and learner compute in bfloat16, their logprobs differ by about 0.02 per token before the policy has
    moved. min(1, rho) can only shrink a trace, by half the mean of |log rho| per token, so a trace of c fades in 100 to
    200 tokens. Of a reward after 2,000 tokens, 2e-7 reaches the first turn; with `noise` 0.06 it is 0.85, with 0.08
    (four times that deviation) 0.98. In exchange, a change of the policy by less than `noise` at a token is ignored.
    """
    return torch.where(log_rhos_N.abs() <= noise, 0.0, log_rhos_N) if noise > 0 else log_rhos_N


def turn_ratios(log_ratios_N: Tensor, turn_end_N: Tensor, ratio: str) -> Tensor:
    """Return [N]: for each token the log of its turn's ratio, which is the "product" of its tokens' ratios or their
    "geometric" mean."""
    sums_N = segment_sum(log_ratios_N, turn_end_N)
    return sums_N if ratio == "product" else sums_N / segment_sum(torch.ones_like(sums_N), turn_end_N)


@torch.no_grad()
def trace_lengths(
    log_rhos_N: Tensor, turn_end_N: Tensor, episode_end_N: Tensor, *, lam: float, c_bar: float | None, level: str
) -> Tensor:
    """Return [N]: for each token the effective length of its trace in tokens, the sum over k >= 0 of c_t ... c_{t+k-1}.

    At `level` "token" each token counts 1 and lambda applies only between turns. At "turn" a turn counts the number of
    its tokens, all of which get the turn's value. Traces end with their episode; the discount is not included.
    On-policy with lambda = 1 the length is the number of tokens left, this one included. `log_rhos_N`: log ratios of
    the actions, as in `TokenTargets.log_rhos`.
    """
    cs_N = log_rhos_N.clamp(max=MAX_LOG_RHO).exp().clamp(max=inf if c_bar is None else c_bar)
    carried_N = torch.where(episode_end_N, 0.0, torch.where(turn_end_N, lam * cs_N, cs_N))
    if level == "token":
        return reverse_scan(carried_N[:, None], torch.ones_like(carried_N)[:, None])[:, 0]
    turn_N = segment_ids(turn_end_N)
    carried_S1, lengths_S1 = (
        torch.zeros_like(x_N).index_add(0, turn_N, x_N)[:, None]
        for x_N in (torch.where(turn_end_N, carried_N, 0.0), torch.ones_like(carried_N))
    )
    return reverse_scan(carried_S1, lengths_S1)[:, 0][turn_N]


# ---------------------------------------------------------------------- sums over turns and episodes


def segment_ids(end_N: Tensor) -> Tensor:
    """Return int64 [N]: for each token the index of its segment (turn or episode). `end_N` is true at the last token of
    each."""
    return end_N.long().cumsum(0) - end_N.long()


def segment_sum(values_N: Tensor, end_N: Tensor) -> Tensor:
    """Return [N]: for each token the sum over its segment."""
    ids_N = segment_ids(end_N)
    return torch.zeros_like(values_N).index_add(0, ids_N, values_N)[ids_N]


def segment_mean(values_N: Tensor, end_N: Tensor) -> Tensor:
    """Return [N]: for each token the mean over its segment."""
    return segment_sum(values_N, end_N) / segment_sum(torch.ones_like(values_N), end_N)


def segment_max(values_N: Tensor, end_N: Tensor) -> Tensor:
    """Return [N]: for each token the largest value in its segment."""
    ids_N = segment_ids(end_N)
    return torch.full_like(values_N, -inf).scatter_reduce(0, ids_N, values_N, "amax")[ids_N]


def segment_start(end_N: Tensor) -> Tensor:
    """Return bool [N], true at the first token of each segment."""
    return torch.cat([torch.ones_like(end_N[:1]), end_N[:-1]])


def turn_indices(turn_end_N: Tensor, episode_end_N: Tensor) -> Tensor:
    """Return int64 [N]: for each token the index of its turn in the episode, from 0."""
    turns_N = segment_ids(turn_end_N)
    first_N = torch.where(segment_start(episode_end_N), turns_N, 0).cummax(0).values
    return turns_N - first_N
