"""The terms of a loss, per token: policy, KL to the reference, critic. N = sampled tokens of one microbatch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from learner.objective.loss_records import Labels, Loss, Tokens
from learner.vtrace import TokenTargets
from shared.config.objective_section import ObjectiveConfig

# Larger log ratios count as this: the product of two such ratios is finite in float32. An infinite ratio times the
# weight 0 of a token that takes no part would not be a number.
MAX_LOG_RATIO = 40.0


class PolicyTerm(NamedTuple):
    loss_N: Tensor
    clipped_N: Tensor  # bool, true where the clip removed the gradient


def policy_term(
    logprobs_N: Tensor,
    log_ratios_N: Tensor,
    advantages_N: Tensor,
    *,
    log_corrections_N: Tensor | None = None,
    max_weight: float | None = None,
    clip: tuple[float, float] | None = None,
    dual_clip: float | None = None,
    outside_N: Tensor | None = None,
) -> PolicyTerm:
    """Return -w A log pi per token, with w = min(max_weight, ratio), w = 0 if clipped. Only logprobs get a gradient.

    This is the gradient of PPO's min(ratio A, clip(ratio) A) (Schulman et al., 2017, equation 7), with separate bounds
    on each side (DAPO, equation 8), and of the dual clip max(., c A) for A < 0 (Ye et al., 2020, equation 5). With
    `log_corrections_N` the ratio is pi/prox and w = min(max_weight, prox/mu) ratio: the decoupled objective (Hilton et
    al., 2022; AReaL: Fu et al., 2025), whose clip depends only on the policy's change since prox.

    Args:
        logprobs_N: log pi of the sampled tokens, differentiable.
        log_ratios_N: log of pi/mu, of the token or of the turn or episode that contains it; no gradient flows into it.
        advantages_N: of each token; no gradient flows into it.
        log_corrections_N: log of prox/mu, if `log_ratios_N` are of pi/prox; None = they are of pi/mu.
        max_weight: truncation of the importance weight; None = none.
        clip: (low, high): no gradient outside of [1 - low, 1 + high] if the advantage pushes further out; None = none.
        dual_clip: no gradient where A < 0 and the ratio exceeds it; None = none.
        outside_N: bool, no gradient there; None = nowhere.
    """
    ratios_N = log_ratios_N.detach().clamp(max=MAX_LOG_RATIO).exp()
    if log_corrections_N is None:
        weights_N = ratios_N if max_weight is None else ratios_N.clamp(max=max_weight)
    else:
        corrections_N = log_corrections_N.detach().clamp(max=MAX_LOG_RATIO).exp()
        weights_N = ratios_N * (corrections_N if max_weight is None else corrections_N.clamp(max=max_weight))
    clipped_N = torch.zeros_like(ratios_N, dtype=torch.bool)
    if clip is not None:
        low, high = clip
        clipped_N = torch.where(advantages_N > 0, ratios_N > 1 + high, (advantages_N < 0) & (ratios_N < 1 - low))
    if dual_clip is not None:
        clipped_N = clipped_N | ((advantages_N < 0) & (ratios_N > dual_clip))
    if outside_N is not None:
        clipped_N = clipped_N | outside_N
    weights_N = weights_N.masked_fill(clipped_N, 0.0)
    return PolicyTerm(-(weights_N * advantages_N).detach() * logprobs_N, clipped_N)


def soft_gate_term(
    logprobs_N: Tensor,
    log_ratios_N: Tensor,
    advantages_N: Tensor,
    temperatures: tuple[float, float],
    *,
    log_corrections_N: Tensor | None = None,
    max_correction: float | None = None,
) -> PolicyTerm:
    """Return -w A log pi per token with a weight that fades with the ratio's distance from 1 (SAPO: Gao et al., 2025,
    equations 5 and 6).

    w = 4 s (1 - s) ratio, with s = sigmoid(tau (ratio - 1)) and `temperatures` = (tau for A > 0, tau for others): the
    gradient of 4/tau s A. Other arguments are those of `policy_term`; prox/mu is truncated at `max_correction`.
    """
    positive, other = temperatures
    ratios_N = log_ratios_N.detach().clamp(max=MAX_LOG_RATIO).exp()
    tau_N = torch.full_like(ratios_N, other).masked_fill(advantages_N > 0, positive)
    slope_N = torch.sigmoid(tau_N * (ratios_N - 1))
    weights_N = 4 * slope_N * (1 - slope_N) * ratios_N
    if log_corrections_N is not None:
        corrections_N = log_corrections_N.detach().clamp(max=MAX_LOG_RATIO).exp()
        weights_N = weights_N * (corrections_N if max_correction is None else corrections_N.clamp(max=max_correction))
    return PolicyTerm(-(weights_N * advantages_N).detach() * logprobs_N, torch.zeros_like(ratios_N, dtype=torch.bool))


def kl_term(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: str) -> Tensor:
    """Return estimates of KL(pi, reference) from tokens of pi (Schulman, 2020, "Approximating KL divergence"), [N].

    With l = log pi - log reference: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l. k2 and k3 are differentiated directly.
    The direct derivative of k1 has mean 0, so k1 has the value l but the gradient of the KL: l grad log pi.

    The factor of grad log pi is l for k1 and k2, and 1 - exp(-l) = 1 - reference/pi for k3. The latter has no bound:
    for a token that the reference prefers but the policy has all but given up (l = -6: -402), it is so large that few
    tokens can dominate the gradient.
    """
    difference_N = logprobs_N - reference_logprobs_N.detach()
    match estimator:
        case "k1":
            return difference_N.detach() * (1 + logprobs_N - logprobs_N.detach())
        case "k2":
            return 0.5 * difference_N.square()
        case _:
            return torch.expm1(-difference_N.clamp(min=-2 * MAX_LOG_RATIO)) + difference_N


def teacher_term(
    logprobs_N: Tensor,
    teacher_logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    direction: str,
    max_weight: float | None = None,
    baseline: Tensor | float = 0.0,
) -> Tensor:
    """Return estimates of the KL between policy and teacher from tokens of mu, [N], whose gradient is the KL's (Agarwal
    et al., 2024, "On-policy distillation of language models"; by the sampled token alone).

    With l = log pi - log teacher and w = min(max_weight, pi/mu), the values and the factors of grad log pi are

        reverse  KL(pi, teacher)  l                    w (l - baseline)
        forward  KL(teacher, pi)  exp(-l) (-l - 1) + 1  w (1 - exp(-l))

    A mean over tokens of mu = pi has exactly the gradient of the KL, since grad log pi has the mean 0. Without a
    baseline a policy that is far from its teacher is pushed away from all that it samples, and truncated weights let it
    drift; the forward factor has one of its own, 1. The reverse factor grows with the logarithm of the ratio, the
    forward one with the ratio itself: a token that the teacher prefers and the policy has all but given up weighs as
    much as hundreds of others.
    """
    difference_N = (logprobs_N - teacher_logprobs_N).detach().clamp(min=-MAX_LOG_RATIO)
    weights_N = (logprobs_N - behaviour_logprobs_N).detach().clamp(max=MAX_LOG_RATIO).exp()
    weights_N = weights_N if max_weight is None else weights_N.clamp(max=max_weight)
    if direction == "reverse":
        values_N, factors_N = difference_N, difference_N - baseline
    else:
        ratios_N = (-difference_N).exp()
        values_N, factors_N = ratios_N * (-difference_N - 1) + 1, 1 - ratios_N
    return values_N + weights_N * factors_N * (logprobs_N - logprobs_N.detach())


def hold_term(logprobs_N: Tensor, labels: Labels, label_logprobs_K: Tensor) -> Tensor:
    """Return -log pi of the reference's label at each sampled token, [N]; 0 without a label.

    It is the cross entropy to the label and has no sampling noise: if the policy prefers another token, the label's
    probability is raised, and if both agree it is raised in proportion to 1 - pi. `labels`: of the reference;
    `label_logprobs_K`: log pi of the labels that were not sampled.
    """
    held_N = torch.where(labels.agrees_N, -logprobs_N, torch.zeros_like(logprobs_N))
    return held_N.index_add(0, labels.rows_K, -label_logprobs_K)


def value_term(values_N: Tensor, vs_N: Tensor, clip: float | None) -> Tensor:
    """Return (V - vs)^2 / 2 per token; errors beyond `clip` count linearly (Huber), so that no gradient exceeds
    `clip`."""
    error_N = values_N - vs_N.detach()
    if clip is None:
        return 0.5 * error_N.square()
    inside_N = error_N.abs().clamp(max=clip)
    return inside_N * (error_N.abs() - 0.5 * inside_N)


def total_loss(
    tokens: Tokens,
    config: ObjectiveConfig,
    term: PolicyTerm,
    advantages_N: Tensor,
    targets: TokenTargets | None = None,
    value: Tensor | float = 0.0,
) -> Loss:
    """Return the loss of an objective: the sum over tokens of its policy term and the configured terms (KL, hold,
    teacher, entropy bonus), plus `value`.

    The policy term is 0 where the policy is almost certain (`min_entropy`): there advantages only add noise. Tokens
    with a hold term get no entropy bonus, since nothing is to be explored there. `advantages_N`: before any weight, for
    the metrics; `targets`: of a critic; `value`: its summed and weighted term.
    """
    if config.min_entropy:
        certain_N = tokens.entropies.detach() < config.min_entropy
        term = term._replace(loss_N=term.loss_N.masked_fill(certain_N, 0.0))
    per_token_N = config.reward_weight * term.loss_N
    kl_N = torch.zeros_like(tokens.logprobs)
    if tokens.reference_logprobs is not None:
        kl_N = kl_term(tokens.logprobs, tokens.reference_logprobs, config.kl_estimator)
        if config.kl_max_entropy is not None:
            assert tokens.reference_entropies is not None
            kl_N = kl_N.masked_fill(tokens.reference_entropies > config.kl_max_entropy, 0.0)
        if not config.kl_in_reward:
            per_token_N = per_token_N + config.kl_coef * kl_N
    teacher_N = None
    if tokens.teacher_logprobs is not None:
        own = (tokens.logprobs, tokens.teacher_logprobs, tokens.behaviour_logprobs)
        baseline = 0.0 if tokens.teacher_baselines is None else tokens.teacher_baselines
        teacher_N = teacher_term(*own, config.teacher_kl, config.pg_rho_bar, baseline)
        per_token_N = per_token_N + config.teacher_weight * teacher_N
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
    total = (tokens.weights * per_token_N).sum() + config.reward_weight * value
    hold_N = None if tokens.hold is None else tokens.hold.detach()
    columns = (term.loss_N.detach(), term.clipped_N, kl_N.detach(), advantages_N, vs_N, value_weights_N, hold_N)
    return Loss(total, *columns, teacher_N=None if teacher_N is None else teacher_N.detach())
