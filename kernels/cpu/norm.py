"""RMS norm of rows on a CPU, with gradients, in C: one pass over memory in each direction, where torch makes several.

Suffixes: N = rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.cpu.library import built, takes

__all__ = ["rms_norm", "takes"]
_BLOCK_ROWS = 64  # as in norm.c


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width] over the root of its mean square and eps, times weight [width] (Zhang and Sennrich, 2019, equation
    4); float32. `takes` says of both whether this can be had. A row is computed alike whatever the others are."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


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
