"""Plain float64 references of the kernels, for comparison in tests. Nothing here is fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return (logprob_N, entropy_N) in float64 from the full [N, V] logits; differentiable."""
    logits_NV = hidden_NH.double() @ weight_VH.double().t() / temperature
    banned_V = torch.zeros(weight_VH.shape[0], dtype=torch.bool, device=weight_VH.device)
    banned_V[list(banned_ids)] = True
    logprobs_NV = logits_NV.masked_fill(banned_V, float("-inf")).log_softmax(-1)
    logprob_N = logprobs_NV.gather(1, target_N.long()[:, None])[:, 0]
    entropy_N = -(logprobs_NV.exp() * logprobs_NV.masked_fill(banned_V, 0.0)).sum(-1)
    return logprob_N, entropy_N


def reverse_scan(decay_TB: Tensor, delta_TB: Tensor) -> Tensor:
    """Compute `acc_t = delta_t + decay_t * acc_{t+1}` as a loop in float64."""
    decay_TB, delta_TB = decay_TB.double(), delta_TB.double()
    out_TB = torch.empty_like(delta_TB)
    acc_B = torch.zeros_like(delta_TB[0])
    for t in reversed(range(len(delta_TB))):
        acc_B = out_TB[t] = delta_TB[t] + decay_TB[t] * acc_B
    return out_TB
