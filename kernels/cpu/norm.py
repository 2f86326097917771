"""RMS norm of rows on a CPU, and that of heads with their rotary embedding, with gradients, in C: one pass over memory
in each direction, where torch makes several.

Suffixes: N = rows, H = heads, D = head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.cpu.library import MAX_HEAD, built, takes

__all__ = ["rms_norm", "rms_norm_turned", "takes", "turns"]
_BLOCK_ROWS = 64  # as in norm.c


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width] over the root of its mean square and eps, times weight [width] (Zhang and Sennrich, 2019, equation
    4); float32. `takes` says of both whether this can be had. A row is computed alike whatever the others are."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


def rms_norm_turned(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The norm over weight [D] of each head of x [1, N, H, D], turned by its token's cos and sin [1, N, D] (Su et al.,
    2021, equation 34, with halves for pairs); float32. Angles get no gradient. `turns` says whether this can be had."""
    out: Tensor = _TurnedNorm.apply(x, weight, eps, cos, sin)
    return out


def turns(x: Tensor, weight: Tensor, cos: Tensor) -> bool:
    return x.shape[-1] <= MAX_HEAD and x.shape[-1] % 2 == 0 and takes(x) and takes(weight) and takes(cos)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        normed, scale_N = torch.empty_like(x), x.new_empty(x.numel() // len(weight))
        shape = len(scale_N), len(weight), torch.get_num_threads()
        built().rms_norm(x.data_ptr(), weight.data_ptr(), eps, *shape, normed.data_ptr(), scale_N.data_ptr())
        ctx.save_for_backward(x, weight, scale_N)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale_N = ctx.saved_tensors
        grad, for_x = grad.contiguous(), torch.empty_like(x)
        for_weight = x.new_empty(-(-len(scale_N) // _BLOCK_ROWS), len(weight))
        shape = len(scale_N), len(weight), torch.get_num_threads()
        given = (tensor.data_ptr() for tensor in (x, weight, scale_N, grad))
        built().rms_norm_backward(*given, *shape, for_x.data_ptr(), for_weight.data_ptr())
        return for_x, for_weight.sum(0) if ctx.needs_input_grad[1] else None, None


class _TurnedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        turned, scale_1NH = torch.empty_like(x), x.new_empty(x.shape[:3])
        given = x.data_ptr(), weight.data_ptr(), eps, cos.data_ptr(), sin.data_ptr()
        shape = *x.shape[1:], torch.get_num_threads()
        built().rms_norm_turn(*given, *shape, turned.data_ptr(), scale_1NH.data_ptr())
        ctx.save_for_backward(x, weight, scale_1NH, cos, sin)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *_ = ctx.saved_tensors
        grad, for_x = grad.contiguous(), torch.empty_like(x)
        for_weight = x.new_empty(-(-x.shape[1] // _BLOCK_ROWS), len(weight))
        given = (tensor.data_ptr() for tensor in (*ctx.saved_tensors, grad))
        shape = *x.shape[1:], torch.get_num_threads()
        built().rms_norm_turn_backward(*given, *shape, for_x.data_ptr(), for_weight.data_ptr())
        return for_x, for_weight.sum(0) if ctx.needs_input_grad[1] else None, None, None, None
