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


def gated_delta_rule(
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of one document, token by token in float64, from a state: (out [T,H,V], the last
    state)."""
    query, key, value, g, beta = (x.double() for x in (query_THK, key_THK, value_THV, g_TH, beta_TH))
    shared, outs = value.shape[1] // key.shape[1], []
    for t in range(len(value)):
        q_HK, k_HK = (
            (x[t] / (x[t].square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 0)
            for x in (query, key)
        )
        state_HKV = g[t].exp()[:, None, None] * state_HKV.double()
        error_HV = value[t] - torch.einsum("hk,hkv->hv", k_HK, state_HKV)
        state_HKV = state_HKV + torch.einsum("hk,hv->hkv", k_HK, beta[t][:, None] * error_HV)
        outs.append(torch.einsum("hk,hkv->hv", q_HK, state_HKV) / key.shape[-1] ** 0.5)
    return torch.stack(outs), state_HKV


def short_conv(x_TC: Tensor, weight_CJ: Tensor, history_JC: Tensor) -> Tensor:
    """Compute the causal convolution of one document's channels, and SiLU, in float64. `history`: the inputs before."""
    read = torch.cat((history_JC, x_TC)).double()
    taps = weight_CJ.shape[1]
    outs = [(read[t : t + taps] * weight_CJ.double().T).sum(0) for t in range(len(x_TC))]
    return torch.nn.functional.silu(torch.stack(outs))
