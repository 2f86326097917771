"""RMS norms of rows, rotary embeddings of heads, and both at once on a GPU, with gradients, as Triton kernels.

Each is one pass over memory in each direction; torch makes several. All is computed in float32 and rounded once to the
dtype of x.

Suffixes: N = tokens, H = heads, D = head size.
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
from kernels.heads import by_token

__all__ = ["apply_rope", "rms_norm", "rms_norm_rope", "supports_rms_norm", "supports_rope"]
PAIRS = 1024  # pairs of numbers per program; a pair has one number in each half of a row


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x [..., width]: x / sqrt(mean square + eps) * weight [width] (Zhang and Sennrich, 2019,
    equation 4). Call it only if `supports_rms_norm`."""
    out: Tensor = _NormRope.apply(x.unsqueeze(-2), weight, eps, None, None)
    return out.squeeze(-2)


def rms_norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise each head of x [1, N, H, D] with weight [D] and rotate it by its token's cos and sin [1, N, D] (Su et
    al., 2021, equation 34, with pairs formed from the two halves).

    Angles get no gradient. Call it only if `supports_rope`.
    """
    out: Tensor = _NormRope.apply(x, weight, eps, cos, sin)
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [N, H, D] by their token's cos and sin [N, D]. A strided view of tokens' heads is read without a
    copy."""
    out: Tensor = _NormRope.apply(x, None, 0.0, cos, sin)
    return out


def supports_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `rms_norm` supports these tensors."""
    return x.shape[-1] % 2 == 0 and x.shape[-1] <= MAX_WIDTH and is_supported(x, weight)


def supports_rope(x: Tensor, weight: Tensor | None, cos: Tensor) -> bool:
    """Tell whether `rms_norm_rope`, or `apply_rope` if weight is None, supports these tensors. The sines must be like
    the cosines."""
    return supports_rms_norm(x, x if weight is None else weight) and is_supported(cos)


class _NormRope(torch.autograd.Function):
    """RMS norm and rotation of x [..., H, D]. Weight and scale apply to heads, the angles, if given, to tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor | None, sin: Tensor | None
    ) -> Tensor:
        out, heads_NHD = torch.empty(x.shape, dtype=x.dtype, device=x.device), by_token(x)
        angles = tuple(None if part is None else part.contiguous() for part in (cos, sin))
        num_rows = _num_rows(heads_NHD)
        scale = None if weight is None else x.new_empty(num_rows, dtype=torch.float32)
        rows, half = _rows_of_a_program(x.shape[-1]), x.shape[-1] // 2
        with torch.cuda.device_of(x):
            _norm[(max(1, triton.cdiv(num_rows, rows["ROWS"])),)](
                heads_NHD, heads_NHD.stride(0), weight, *angles, out, scale, num_rows, x.shape[-2], half, eps, **rows
            )
        ctx.shape = x.shape
        ctx.save_for_backward(None if weight is None else heads_NHD, weight, scale, *angles)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # accessed once: recomputed activations cannot be read twice
        heads_NHD, weight, scale, cos, sin = ctx.saved_tensors
        num_heads, width = ctx.shape[-2:]
        grad_NHD = by_token(grad)
        for_x, rows = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device), _rows_of_a_program(width)
        blocks = max(1, triton.cdiv(_num_rows(grad_NHD), rows["ROWS"]))
        programs = blocks if weight is None else min(blocks, MAX_PROGRAMS)
        for_weight = grad.new_empty(programs, width, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with torch.cuda.device_of(grad):
            _norm_grad[(programs,)](
                heads_NHD, 0 if heads_NHD is None else heads_NHD.stride(0), weight, cos, sin, scale, grad_NHD,
                grad_NHD.stride(0), for_x, for_weight, _num_rows(grad_NHD), num_heads, width // 2,
                triton.cdiv(blocks, programs), **rows,
            )  # fmt: skip
        return for_x, None if for_weight is None else for_weight.sum(0).to(weight.dtype), None, None, None


def _num_rows(heads_NHD: Tensor) -> int:
    return heads_NHD.shape[0] * heads_NHD.shape[1]


def _rows_of_a_program(width: int) -> dict[str, int]:
    pairs = triton.next_power_of_2(width // 2)
    return {"ROWS": max(1, PAIRS // pairs), "HALF": pairs, "num_warps": max(4, pairs // 256)}


@triton.jit
def _offsets(row, column, token_stride, heads, half):
    """Return the offsets of these rows' first halves from the first token: [ROWS, HALF]."""
    token = row // heads
    return (token * token_stride + (row - token * heads) * (2 * half))[:, None] + column[None, :]


@triton.jit
def _pair(ptr, at, half, inside):
    """Load both halves of rows in float32; 0 outside."""
    first = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(ptr + at + half, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_pair(ptr, at, half, inside, first, second):
    tl.store(ptr + at, first.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + at + half, second.to(ptr.dtype.element_ty), mask=inside)


@jit("num_rows")
def _norm(
    x_ptr, token_stride, weight_ptr, cos_ptr, sin_ptr, out_ptr, scale_ptr, num_rows, heads, half, eps,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    inside = (row < num_rows)[:, None] & (column < half)[None, :]
    x1, x2 = _pair(x_ptr, _offsets(row, column, token_stride, heads, half), half, inside)
    if weight_ptr is not None:
        w1, w2 = _pair(weight_ptr, column[None, :], half, (column < half)[None, :])
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * half) + eps)
        tl.store(scale_ptr + row, scale, mask=row < num_rows)
        x1, x2 = x1 * scale[:, None] * w1, x2 * scale[:, None] * w2
    if cos_ptr is not None:
        angle = (row // heads * (2 * half))[:, None] + column[None, :]
        c1, c2 = _pair(cos_ptr, angle, half, inside)
        s1, s2 = _pair(sin_ptr, angle, half, inside)
        x1, x2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    _store_pair(out_ptr, _offsets(row, column, heads * (2 * half), heads, half), half, inside, x1, x2)


@jit("num_rows", "blocks")
def _norm_grad(
    x_ptr, token_stride, weight_ptr, cos_ptr, sin_ptr, scale_ptr, grad_ptr, grad_stride, for_x_ptr, for_weight_ptr,
    num_rows, heads, half, blocks, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute `blocks` blocks of rows in each program, which sums the weight's gradient over them."""
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    if weight_ptr is not None:
        w1, w2 = _pair(weight_ptr, column[None, :], half, (column < half)[None, :])
        sum1, sum2 = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
    for block in range(blocks):
        row = (program * blocks + block) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < half)[None, :]
        g1, g2 = _pair(grad_ptr, _offsets(row, column, grad_stride, heads, half), half, inside)
        if cos_ptr is not None:
            angle = (row // heads * (2 * half))[:, None] + column[None, :]
            c1, c2 = _pair(cos_ptr, angle, half, inside)
            s1, s2 = _pair(sin_ptr, angle, half, inside)
            g1, g2 = g1 * c1 + g2 * s2, g2 * c2 - g1 * s1
        if weight_ptr is not None:
            scale = tl.load(scale_ptr + row, mask=row < num_rows, other=0.0)[:, None]
            x1, x2 = _pair(x_ptr, _offsets(row, column, token_stride, heads, half), half, inside)
            n1, n2 = x1 * scale, x2 * scale
            sum1 += g1 * n1
            sum2 += g2 * n2
            g1, g2 = g1 * w1, g2 * w2
            along = ((tl.sum(g1 * n1, 1) + tl.sum(g2 * n2, 1)) / (2 * half))[:, None]
            g1, g2 = (g1 - n1 * along) * scale, (g2 - n2 * along) * scale
        _store_pair(for_x_ptr, _offsets(row, column, heads * (2 * half), heads, half), half, inside, g1, g2)
    if for_weight_ptr is not None:
        at = program * (2 * half) + column
        _store_pair(for_weight_ptr, at, half, column < half, tl.sum(sum1, 0), tl.sum(sum2, 0))
