"""Objectives over sampled tokens: pure functions of a record of tokens, each one scalar, divided once.

Every policy loss is the same gradient, -w A grad(log pi), summed over tokens, and objectives differ in A and in w:

    objective  A                  ratio            w
    vtrace     q - V (V-trace)    token or turn    min(pg_rho_bar, ratio), 0 where clipped (unless vtrace_clip = false)
    ppo        q - V (GAE)        token or turn    min(pg_rho_bar, ratio), 0 where clipped
    grpo       group-relative     token            min(pg_rho_bar, ratio), 0 where clipped
    gspo       group-relative     whole episode    min(pg_rho_bar, ratio), 0 where clipped
    cispo      group-relative     token            min(1 + clip_high, ratio), never 0

The ratio is pi/mu, mu the behaviour logprobs of the wire. With `proximal = "learner"` it is pi/prox, prox being the
policy as the step began, and w = min(pg_rho_bar, prox/mu) ratio. DAPO (Yu et al., 2025) is `grpo` with
clip_high > clip_low, aggregation `token_mean`, dynamic sampling and overlong episodes masked or penalised. Shape
suffixes: N = sampled tokens of one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from learner.advantages import Scaling
from learner.objective.ratios import corrected, dropped
from learner.objective.records import Loss, Tokens
from learner.objective.terms import PolicyTerm, kl_term, policy_term, value_term
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
from shared.settings.objective import ObjectiveConfig

PLAIN = Scaling()


def loss_of(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """The objective that `config` names, on behaviour and tokens as it wants them. `scaling` is of the critic's
    advantages. Tokens that are dropped have weight 0 in all sums."""
    tokens = corrected(tokens, config)
    out = dropped(tokens, config)
    if out is not None:
        tokens = replace(tokens, weights=tokens.weights.masked_fill(out.any_N, 0.0))
    return OBJECTIVES[config.name](tokens, config, scaling)._replace(dropped=out)


def vtrace(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Actor-critic with V-trace targets (Espeholt et al., 2018, section 4.2): policy + value_coef value term.

    At the level of turns, the critic learns at the first token of each turn, where the turn is chosen, with the weight
    of all its tokens. Ratios within `rho_noise` of 1 count as 1.
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
    """Clipped surrogate with generalised advantages (Schulman et al., 2017, equations 7 and 11; GAE: 2016).

    Targets take tokens for the policy's own, however old: V-trace with every rho = 1 is the lambda-return. Values in
    them are those of the current update, as in every other objective here, and the value loss has no clip of PPO's.
    """
    targets = _targets(tokens, config, torch.zeros_like(tokens.logprobs))
    log_ratios_N = _of_actions((tokens.logprobs - tokens.behaviour_logprobs).detach(), tokens, config)
    return _actor_critic(tokens, config, targets, log_ratios_N, scaling, clipped=True)


def grpo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """Group-relative policy gradient (Shao et al., 2024, equation 3) with truncated importance weights per token."""
    return _group_relative(tokens, config, lambda log_ratios_N: log_ratios_N)


def gspo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """One ratio an episode, the geometric mean of its tokens' (GSPO: Zheng et al., 2025, equations 5 to 7).

    With aggregation `sequence_mean` it is the paper's objective; its clip range is much narrower than a token's, of the
    order of 3e-4. A range so narrow needs `proximal = "learner"`: between engine and learner the mean of 500 tokens has
    a deviation of 9e-4 in bfloat16 before the policy has moved at all.
    """
    return _group_relative(tokens, config, lambda log_ratios_N: segment_mean(log_ratios_N, tokens.episode_end))


def cispo(tokens: Tokens, config: ObjectiveConfig, scaling: Scaling = PLAIN) -> Loss:
    """The importance weight is clipped, no token loses its gradient (MiniMax-M1, 2025, equations 4 and 5).

    It has no floor, as in that paper's experiments and in ScaleRL (Khatri et al., 2025): a token that the policy has
    left would go on being pushed away with the floor's weight, ever farther.
    """
    log_ratios_N = (tokens.logprobs - tokens.behaviour_logprobs).detach()
    held_N = log_ratios_N.clamp(max=math.log1p(config.clip_high))
    term = policy_term(tokens.logprobs, held_N, tokens.advantages)
    return _loss(tokens, config, PolicyTerm(term.loss_N, held_N != log_ratios_N), tokens.advantages)


Objective = Callable[[Tokens, ObjectiveConfig, Scaling], Loss]
OBJECTIVES: dict[str, Objective] = {"vtrace": vtrace, "ppo": ppo, "grpo": grpo, "gspo": gspo, "cispo": cispo}


def _targets(tokens: Tokens, config: ObjectiveConfig, log_rhos_N: Tensor) -> TokenTargets:
    """Of V-trace, with the KL in the rewards where the recipe has it there."""
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
    """Of each token, or of the turn that it is part of."""
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
    """`log_ratios_N`: of pi/mu, of actions; prox takes mu's place where there is one."""
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
    return _loss(tokens, config, term, targets.advantages, targets, config.value_coef * value)


def _group_relative(tokens: Tokens, config: ObjectiveConfig, of_actions: Callable[[Tensor], Tensor]) -> Loss:
    """`of_actions`: from log ratios of tokens to those that weights and clips act on."""
    start, corrections_N = tokens.behaviour_logprobs, None
    if tokens.proximal_logprobs is not None:
        start = tokens.proximal_logprobs
        corrections_N = of_actions((start - tokens.behaviour_logprobs).detach())
    term = policy_term(
        tokens.logprobs,
        of_actions((tokens.logprobs - start).detach()),
        tokens.advantages,
        log_corrections_N=corrections_N,
        max_weight=config.pg_rho_bar,
        clip=(config.clip_low, config.clip_high),
        dual_clip=config.dual_clip,
    )
    return _loss(tokens, config, term, tokens.advantages)


def _loss(
    tokens: Tokens,
    config: ObjectiveConfig,
    term: PolicyTerm,
    advantages_N: Tensor,
    targets: TokenTargets | None = None,
    value: Tensor | float = 0.0,
) -> Loss:
    """The sum over tokens of policy term, KL and entropy, and the value's sum. The policy term is 0 where the policy is
    as good as certain (`min_entropy`): there advantages only add noise to what it always says. What is held
    has no entropy bonus: there is nothing to explore."""
    if config.min_entropy:
        certain_N = tokens.entropies.detach() < config.min_entropy
        term = term._replace(loss_N=term.loss_N.masked_fill(certain_N, 0.0))
    per_token_N = term.loss_N
    kl_N = torch.zeros_like(tokens.logprobs)
    if tokens.reference_logprobs is not None:
        kl_N = kl_term(tokens.logprobs, tokens.reference_logprobs, config.kl_estimator)
        if config.kl_max_entropy is not None:
            assert tokens.reference_entropies is not None
            kl_N = kl_N.masked_fill(tokens.reference_entropies > config.kl_max_entropy, 0.0)
        if not config.kl_in_reward:
            per_token_N = per_token_N + config.kl_coef * kl_N
    if tokens.hold is not None:
        per_token_N = per_token_N + config.hold_coef * tokens.hold
    if config.entropy_coef:
        entropies_N = tokens.entropies
        if tokens.hold is not None:
            entropies_N = entropies_N.masked_fill(tokens.hold.detach() > 0, 0.0)
        per_token_N = per_token_N - config.entropy_coef * entropies_N
    vs_N, value_weights_N = tokens.values.detach(), torch.ones_like(tokens.values)
    if targets is not None:
        vs_N, value_weights_N = targets.vs, targets.value_weights
    total = (tokens.weights * per_token_N).sum() + value
    hold_N = None if tokens.hold is None else tokens.hold.detach()
    columns = (term.loss_N.detach(), term.clipped_N, kl_N.detach(), advantages_N, vs_N, value_weights_N, hold_N)
    return Loss(total, *columns)
