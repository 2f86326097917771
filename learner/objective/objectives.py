"""Objectives over sampled tokens: pure functions from a record of tokens to one scalar, which is divided once.

Every policy loss has the same gradient, -w A grad(log pi), summed over tokens; objectives differ in A and w:

    objective  A                  ratio            w
    vtrace     q - V (V-trace)    token or turn    min(pg_rho_bar, ratio), 0 where clipped (unless vtrace_clip = false)
    ppo        q - V (GAE)        token or turn    min(pg_rho_bar, ratio), 0 where clipped
    grpo       group-relative     token            min(pg_rho_bar, ratio), 0 where clipped
    dr_grpo    the same, undivided by the deviation, and a constant divides the sum over an episode's tokens
    reinforce++  the same, undivided by the deviation, then whitened over the step
    gspo       group-relative     whole episode    min(pg_rho_bar, ratio), 0 where clipped
    cispo      group-relative     token            min(1 + clip_high, ratio), never 0
    sapo       group-relative     token            ratio times a gate that fades as the ratio leaves 1
    dppo       group-relative     token            min(pg_rho_bar, ratio), 0 where the probability has moved too far

`sft` has neither: it is the cross entropy of the tokens.

The ratio is pi/mu, where mu is given by the behaviour logprobs of the wire. With `proximal = "learner"` it is pi/prox,
where prox is the policy as the step began, and w = min(pg_rho_bar, prox/mu) ratio. DAPO (Yu et al., 2025) is `grpo`
with clip_high > clip_low, aggregation `token_mean`, dynamic sampling and overlong episodes masked or penalised. Shape
suffixes: N = sampled tokens of one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from learner.objective.advantages import Scaling
from learner.objective.importance_ratios import corrected, dropped
from learner.objective.loss_records import Loss, Tokens
from learner.objective.loss_terms import PolicyTerm, policy_term, soft_gate_term, total_loss, value_term
from learner.vtrace import (
    TokenTargets,
    segment_mean,
    token_vtrace,
    trace_lengths,
    turn_indices,
    turn_ratios,
    turn_vtrace,
    without_noise,
)
from shared.config.objective_section import ObjectiveConfig

PLAIN = Scaling()


def loss_of(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the loss of the objective that `config` names, after corrections and masks of the tokens.

    `scaling`: of the critic's advantages. Dropped tokens have weight 0 in all sums.
    """
    tokens = corrected(tokens, config)
    out = dropped(tokens, config)
    if out is not None:
        tokens = replace(tokens, weights=tokens.weights.masked_fill(out.any_N, 0.0))
    loss: Loss = config.spec.load_loss()(tokens, config, scaling)
    return loss._replace(dropped=out)


def vtrace(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the actor-critic loss with V-trace targets (Espeholt et al., 2018, section 4.2): policy + value_coef value
    term.

    At the level of turns, the critic is trained at the first token of each turn, where the turn is chosen, with the
    weight of all its tokens. Token ratios whose logarithm is at most `rho_noise` in absolute value count as 1.
    """
    log_rhos_N = without_noise((tokens.logprobs - tokens.behaviour_logprobs).detach(), config.rho_noise)
    targets = _targets(tokens, config, log_rhos_N)
    traces = [
        trace_lengths(
            log_rhos, tokens.turn_end, tokens.episode_end, lam=config.lam, c_bar=config.c_bar, level=config.vtrace_level
        )
        for log_rhos in (targets.log_rhos, torch.zeros_like(log_rhos_N))
    ]
    loss = _actor_critic(tokens, config, targets, targets.log_rhos, scaling, clipped=config.vtrace_clip)
    return loss._replace(trace_N=traces[0], whole_trace_N=traces[1])


def ppo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the clipped surrogate with generalised advantages (Schulman et al., 2017, equations 7 and 11; GAE: 2016).

    The targets treat all tokens as the policy's own, however old: V-trace with every rho = 1 is the lambda-return.
    Their values are those of the current update, as in every other objective here, and the value loss does not have
    PPO's clip.
    """
    targets = _targets(tokens, config, torch.zeros_like(tokens.logprobs))
    log_ratios_N = _of_actions((tokens.logprobs - tokens.behaviour_logprobs).detach(), tokens, config)
    return _actor_critic(tokens, config, targets, log_ratios_N, scaling, clipped=True)


def grpo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the group-relative policy loss (Shao et al., 2024, equation 3) with truncated importance weights per
    token; also of Dr. GRPO (Liu et al., 2025) and of REINFORCE++ with a group's baseline (Hu et al., 2025),
    which differ in advantages and divisors."""
    return _group_relative(tokens, config, lambda log_ratios_N: log_ratios_N)


def gspo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the loss with one ratio per episode, the geometric mean of its tokens' ratios (GSPO: Zheng et al., 2025,
    equations 5 to 7).

    With aggregation `sequence_mean` it is the paper's objective. Its clip range is much narrower than that of tokens,
    about 3e-4. Such a range needs `proximal = "learner"`: in bfloat16, the mean log ratio between engine and learner
    over 500 tokens has a deviation of 9e-4 before the policy has moved at all.
    """
    return _group_relative(tokens, config, lambda log_ratios_N: segment_mean(log_ratios_N, tokens.episode_end))


def cispo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the loss whose importance weight is clipped, so that no token loses its gradient (MiniMax-M1, 2025,
    equations 4 and 5).

    The weight has no lower bound, as in that paper's experiments and in ScaleRL (Khatri et al., 2025): with one, tokens
    that the policy has become unlikely to sample would be pushed away ever further, with the bound's weight.
    """
    log_ratios_N = (tokens.logprobs - tokens.behaviour_logprobs).detach()
    held_N = log_ratios_N.clamp(max=math.log1p(config.clip_high))
    term = policy_term(tokens.logprobs, held_N, tokens.advantages)
    return total_loss(tokens, config, PolicyTerm(term.loss_N, held_N != log_ratios_N), tokens.advantages)


def sapo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the loss whose weight fades with the ratio's distance from 1, in place of a clip (SAPO: Gao et al., 2025,
    equations 5 and 6)."""
    log_ratios_N, corrections_N = _moves(tokens)
    term = soft_gate_term(
        tokens.logprobs,
        log_ratios_N,
        tokens.advantages,
        (config.sapo_tau_positive, config.sapo_tau_negative),
        log_corrections_N=corrections_N,
        max_correction=config.pg_rho_bar,
    )
    return total_loss(tokens, config, term, tokens.advantages)


def dppo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the loss without the tokens whose probability the policy has already moved by more than `divergence_bound`
    in the advantage's direction: a bound on the total variation between the two policies, seen by the sampled token
    alone ("Rethinking the Trust Region in LLM Reinforcement Learning", 2026, binary total variation).

    A clip by ratio drops rare tokens after the smallest change, and lets frequent ones change by a lot.
    """
    log_ratios_N, corrections_N = _moves(tokens)
    start_N = tokens.behaviour_logprobs if tokens.proximal_logprobs is None else tokens.proximal_logprobs
    moved_N = (tokens.logprobs.exp() - start_N.exp()).detach()
    bound = config.divergence_bound
    term = policy_term(
        tokens.logprobs,
        log_ratios_N,
        tokens.advantages,
        log_corrections_N=corrections_N,
        max_weight=config.pg_rho_bar,
        outside_N=torch.where(tokens.advantages > 0, moved_N > bound, moved_N < -bound),
    )
    return total_loss(tokens, config, term, tokens.advantages)


def sft(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Return the cross entropy of the tokens, -log pi: the maximum likelihood of demonstrations, whoever wrote them and
    whatever they earned."""
    term = PolicyTerm(-tokens.logprobs, torch.zeros_like(tokens.logprobs, dtype=torch.bool))
    return total_loss(tokens, config, term, torch.zeros_like(tokens.logprobs))


def _moves(tokens: Tokens) -> tuple[Tensor, Tensor | None]:
    """Return the log ratios to the policy from which a step's move is bounded, and those from the actors' policy to it;
    None if it is the same."""
    if tokens.proximal_logprobs is None:
        return (tokens.logprobs - tokens.behaviour_logprobs).detach(), None
    start_N = tokens.proximal_logprobs
    return (tokens.logprobs - start_N).detach(), (start_N - tokens.behaviour_logprobs).detach()


def _targets(tokens: Tokens, config: ObjectiveConfig, log_rhos_N: Tensor) -> TokenTargets:
    """Return V-trace's targets, with the KL subtracted from the rewards if the recipe says so."""
    rewards_N = tokens.rewards
    if config.kl_in_reward and tokens.reference_logprobs is not None:
        rewards_N = rewards_N - config.kl_coef * (tokens.logprobs - tokens.reference_logprobs).detach()
    compute = token_vtrace if config.vtrace_level == "token" else turn_vtrace
    levels = {} if config.vtrace_level == "token" else {"ratio": config.turn_ratio}
    return compute(
        log_rhos_N,
        rewards_N,
        tokens.values.detach(),
        tokens.turn_end,
        tokens.episode_end,
        gamma=config.gamma,
        lam=config.lam,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        **levels,
    )


def _of_actions(log_ratios_N: Tensor, tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """Return the log ratio of each token or, at the level of turns, of its turn."""
    if config.vtrace_level == "token":
        return log_ratios_N
    return turn_ratios(log_ratios_N, tokens.turn_end, config.turn_ratio)


def _actor_critic(
    tokens: Tokens,
    config: ObjectiveConfig,
    targets: TokenTargets,
    log_ratios_N: Tensor,
    scaling: Scaling,
    *,
    clipped: bool,
) -> Loss:
    """Return the loss of a policy with a critic. `log_ratios_N`: log of pi/mu of the actions; if there is a prox, log
    ratios of pi/prox are used instead."""
    corrections_N = None
    if tokens.proximal_logprobs is not None:
        noisy_N = (tokens.proximal_logprobs - tokens.behaviour_logprobs).detach()
        corrections_N = _of_actions(without_noise(noisy_N, config.rho_noise), tokens, config)
        log_ratios_N = _of_actions((tokens.logprobs - tokens.proximal_logprobs).detach(), tokens, config)
    term = policy_term(
        tokens.logprobs,
        log_ratios_N,
        scaling(targets.advantages, turn_indices(tokens.turn_end, tokens.episode_end)),
        log_corrections_N=corrections_N,
        max_weight=config.pg_rho_bar,
        clip=(config.clip_low, config.clip_high) if clipped else None,
        dual_clip=config.dual_clip if clipped else None,
    )
    value_weights_N = tokens.weights * targets.value_weights
    value = (value_weights_N * value_term(tokens.values, targets.vs, config.value_clip)).sum()
    return total_loss(tokens, config, term, targets.advantages, targets, config.value_coef * value)


def _group_relative(tokens: Tokens, config: ObjectiveConfig, of_actions: Callable[[Tensor], Tensor]) -> Loss:
    """Return the loss of a policy without a critic. `of_actions`: maps the tokens' log ratios to those that weights and
    clips use."""
    log_ratios_N, corrections_N = _moves(tokens)
    term = policy_term(
        tokens.logprobs,
        of_actions(log_ratios_N),
        tokens.advantages,
        log_corrections_N=None if corrections_N is None else of_actions(corrections_N),
        max_weight=config.pg_rho_bar,
        clip=(config.clip_low, config.clip_high),
        dual_clip=config.dual_clip,
    )
    return total_loss(tokens, config, term, tokens.advantages)
