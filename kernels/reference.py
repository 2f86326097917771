"""Plain float64 references of the kernels: what a test compares with. Nothing here is fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    banned_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """(logprob_N, entropy_N) in float64 from the full [N, V] logits; differentiable."""
    logits_NV = hidden_NH.double() @ weight_VH.double().t()
    logits_NV = logits_NV / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    banned_V = torch.zeros(weight_VH.shape[0], dtype=torch.bool, device=weight_VH.device)
    banned_V[list(banned_ids)] = True
    logprobs_NV = logits_NV.masked_fill(banned_V, float("-inf")).log_softmax(-1)
    logprob_N = logprobs_NV.gather(1, target_N.long()[:, None])[:, 0]
    entropy_N = -(logprobs_NV.exp() * logprobs_NV.masked_fill(banned_V, 0.0)).sum(-1)
    return logprob_N, entropy_N


def reverse_scan(
    decay: Tensor, delta: Tensor, *, lengths: Sequence[int] | None = None, initial: Tensor | None = None
) -> Tensor:
    """`acc_t = delta_t + decay_t * acc_{t+1}` as a loop in float64; arguments as those of `kernels.reverse_scan`."""
    decay, delta = decay.double(), delta.double()
    if lengths is not None:
        parts = [
            reverse_scan(a, b, initial=None if initial is None else initial[i])
            for i, (a, b) in enumerate(zip(decay.split(list(lengths)), delta.split(list(lengths)), strict=True))
        ]
        return torch.cat([*parts, delta[:0]])
    out = torch.empty_like(delta)
    acc = torch.zeros(delta.shape[1:], dtype=torch.float64) if initial is None else initial.double()
    for t in reversed(range(len(delta))):
        acc = delta[t] + decay[t] * acc
        out[t] = acc
    return out
