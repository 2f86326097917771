"""Layer norms of rows on a GPU, with gradients, as Triton kernels: one pass over memory in each direction.

Torch's backward makes two, of which the one for weight and bias takes longer than the one for the rows. All is computed
in float32 and rounded once to the dtype of x.

Suffixes: N = rows, W = their width.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gpu.launches import MAX_PROGRAMS, MAX_WIDTH, is_supported, jit

__all__ = ["layer_norm", "supports_layer_norm"]
NUMBERS = 2048  # numbers per program, in whole rows


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of x [..., W]: (x - mean) / sqrt(variance + eps) * weight [W] + bias [W] (Ba et al., 2016,
    equation 4). Call it only if `supports_layer_norm`."""
    out: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return out


def supports_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Tell whether `layer_norm` supports these tensors."""
    if weight is None or bias is None or weight.shape != x.shape[-1:]:
        return False
    return x.shape[-1] <= MAX_WIDTH and is_supported(x, weight, bias)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x_NW = x.reshape(-1, x.shape[-1]).contiguous()
        (num_rows, width), rows = x_NW.shape, _rows_of_a_program(x.shape[-1])
        out, (mean, scale) = torch.empty_like(x_NW), x.new_empty(2, num_rows, dtype=torch.float32)
        with torch.cuda.device_of(x):
            _layer_norm[(max(1, triton.cdiv(num_rows, rows["ROWS"])),)](
                x_NW, weight, bias, out, mean, scale, num_rows, width, eps, **rows
            )
        ctx.save_for_backward(x_NW, weight, mean, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NW, weight, mean, scale = ctx.saved_tensors  # accessed once: recomputed activations cannot be read twice
        (num_rows, width), rows = x_NW.shape, _rows_of_a_program(x_NW.shape[1])
        blocks = max(1, triton.cdiv(num_rows, rows["ROWS"]))
        programs, for_x = min(blocks, MAX_PROGRAMS), torch.empty_like(x_NW)
        trained = any(ctx.needs_input_grad[1:3])
        sums = grad.new_empty(2, programs, width, dtype=torch.float32) if trained else (None, None)
        with torch.cuda.device_of(grad):
            _layer_norm_grad[(programs,)](
                x_NW, weight, mean, scale, grad.reshape(x_NW.shape).contiguous(), for_x, *sums, num_rows, width,
                triton.cdiv(blocks, programs), **rows,
            )  # fmt: skip
        for_weights = sums.sum(1).to(weight.dtype) if isinstance(sums, Tensor) else (None, None)
        return for_x.view(grad.shape), *for_weights, None


def _rows_of_a_program(width: int) -> dict[str, int]:
    padded_width = triton.next_power_of_2(width)
    return {"ROWS": max(1, NUMBERS // padded_width), "WIDTH": padded_width, "num_warps": max(4, padded_width // 512)}


@triton.jit
def _load(ptr, at, inside):
    """Load in float32; 0 outside."""
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@jit("num_rows")
def _layer_norm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, scale_ptr, num_rows, width, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here = column < width
    inside, at = (row < num_rows)[:, None] & here[None, :], row[:, None] * width + column[None, :]
    x = _load(x_ptr, at, inside)
    mean = tl.sum(x, 1) / width
    x = tl.where(inside, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    out = x * scale[:, None] * _load(weight_ptr, column, here)[None, :] + _load(bias_ptr, column, here)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < num_rows)
    tl.store(scale_ptr + row, scale, mask=row < num_rows)


@jit("num_rows", "blocks")
def _layer_norm_grad(
    x_ptr, weight_ptr, mean_ptr, scale_ptr, grad_ptr, for_x_ptr, for_weight_ptr, for_bias_ptr, num_rows, width, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute `blocks` blocks of rows in each program, which sums the gradients of weight and bias over them."""
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    here = column < width
    weight = _load(weight_ptr, column, here)[None, :]
    if for_weight_ptr is not None:
        of_weight, of_bias = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    for block in range(blocks):
        row = (program * blocks + block) * ROWS + tl.arange(0, ROWS)
        inside, at = (row < num_rows)[:, None] & here[None, :], row[:, None] * width + column[None, :]
        mean, scale = _load(mean_ptr, row, row < num_rows)[:, None], _load(scale_ptr, row, row < num_rows)[:, None]
        normed = (_load(x_ptr, at, inside) - mean) * scale
        grad = _load(grad_ptr, at, inside)
        if for_weight_ptr is not None:
            of_weight += grad * normed
            of_bias += grad
        grad *= weight
        along, level = tl.sum(grad * normed, 1)[:, None] / width, tl.sum(grad, 1)[:, None] / width
        for_x = (grad - normed * along - level) * scale
        tl.store(for_x_ptr + at, for_x.to(for_x_ptr.dtype.element_ty), mask=inside)
    if for_weight_ptr is not None:
        at = program * width + column
        tl.store(for_weight_ptr + at, tl.sum(of_weight, 0), mask=here)
        tl.store(for_bias_ptr + at, tl.sum(of_bias, 0), mask=here)
