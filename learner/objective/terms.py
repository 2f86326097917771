"""The terms of a loss, per token: policy, KL to the reference, critic. N = sampled tokens of one microbatch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from learner.objective.records import Labels


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
) -> PolicyTerm:
    """-w A log pi per token, with w = min(max_weight, ratio), and w = 0 where clipped. Gradient to logprobs only.

    This is the gradient of PPO's min(ratio A, clip(ratio) A) (Schulman et al., 2017, equation 7), with bounds of its
    own on each side (DAPO, equation 8), and of the dual clip max(., c A) for A < 0 (Ye et al., 2020, equation 5). With
    `log_corrections_N` the ratio is pi/prox and w = min(max_weight, prox/mu) ratio: the decoupled objective (Hilton et
    al., 2022; AReaL: Fu et al., 2025), whose clip sees the change of the policy alone.

    Args:
        logprobs_N: log pi of the sampled tokens, differentiable.
        log_ratios_N: log of pi/mu, of the token or of whatever it is part of; no gradient flows into it.
        advantages_N: of each token; no gradient flows into it.
        log_corrections_N: log of prox/mu, where `log_ratios_N` are of pi/prox; None = they are of pi/mu.
        max_weight: truncation of the importance weight; None = none.
        clip: (low, high): no gradient beyond [1 - low, 1 + high] where the advantage pushes further out; None = none.
        dual_clip: no gradient where A < 0 and the ratio exceeds it; None = none.
    """
    ratios_N = log_ratios_N.detach().exp()
    if log_corrections_N is None:
        weights_N = ratios_N if max_weight is None else ratios_N.clamp(max=max_weight)
    else:
        corrections_N = log_corrections_N.detach().exp()
        weights_N = ratios_N * (corrections_N if max_weight is None else corrections_N.clamp(max=max_weight))
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

    The factor of grad log pi is l for k1 and k2, and 1 - exp(-l) = 1 - reference/pi for k3: it has no bound where the
    policy has all but given up what the reference would say (l = -6: -402), so that few tokens can make the gradient.
    """
    difference_N = logprobs_N - reference_logprobs_N.detach()
    match estimator:
        case "k1":
            return difference_N.detach() * (1 + logprobs_N - logprobs_N.detach())
        case "k2":
            return 0.5 * difference_N.square()
        case _:
            return torch.expm1(-difference_N) + difference_N


def hold_term(logprobs_N: Tensor, labels: Labels, label_logprobs_K: Tensor) -> Tensor:
    """-log pi of the token that the reference is sure of, [N]; 0 where it is sure of none.

    It is the cross entropy to the reference's one word, and has no noise of sampling: where the policy says something
    else, the right word is pulled up, and where both agree it is made surer by 1 - pi. `labels`: of the reference;
    `label_logprobs_K`: log pi of the tokens that were not sampled.
    """
    held_N = torch.where(labels.agrees_N, -logprobs_N, torch.zeros_like(logprobs_N))
    return held_N.index_add(0, labels.rows_K, -label_logprobs_K)


def value_term(values_N: Tensor, vs_N: Tensor, clip: float | None) -> Tensor:
    """(V - vs)^2 / 2 per token; errors beyond `clip` count linearly (Huber), so that none pulls harder than `clip`."""
    error_N = values_N - vs_N.detach()
    if clip is None:
        return 0.5 * error_N.square()
    inside_N = error_N.abs().clamp(max=clip)
    return inside_N * (error_N.abs() - 0.5 * inside_N)
