"""Whether tokens were sampled from the distribution that their logprobs come from: a sampler that narrows or sharpens
it unasked biases every importance weight, and no comparison of logprobs shows it."""

from __future__ import annotations

from torch import Tensor


def surprise_z(logprobs_KV: Tensor, token_ids_K: Tensor) -> float:
    """The tokens' -log p beyond the entropy, summed, in its standard deviations: about normal if each was sampled from
    its row, for tokens of one sequence too (differences of a martingale)."""
    p, logprobs = logprobs_KV.double().exp(), logprobs_KV.double().clamp(min=-1e4)
    own = logprobs.gather(1, token_ids_K[:, None])[:, 0]
    entropy = -(p * logprobs).sum(1)
    variance = (p * logprobs.square()).sum(1) - entropy.square()
    return float((-own - entropy).sum() / variance.sum().sqrt())
