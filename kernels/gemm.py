"""The three matrix products of the fused log-probability, each with fp32 accumulation, on CPU and GPU.

Each is written where its result belongs. On a CPU all operands are float32; on a GPU they may be narrower.
Shape suffixes: R rows, C vocabulary columns, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.cpu.linear import product, uses_onednn

PIECE = 128  # terms that oneDNN's float32 product sums in one chain; more of them lose digits against other BLAS


class Operand:
    """A contiguous matrix [rows, K] that is read by several products, and its pieces along K, cut once."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole.contiguous()

    @functools.cached_property
    def pieces(self) -> list[Tensor]:
        return [piece.contiguous() for piece in self.whole.split(PIECE, 1)]


def widened(x: Tensor) -> Tensor:
    """A CPU has no product of half-precision operands with a float32 result: there they are widened."""
    return x if x.is_cuda else x.float()


def logits_tile(x_RH: Operand, w_CH: Operand, out_RC: Tensor) -> None:
    """`out = x @ w.T` in float32."""
    if uses_onednn(x_RH.whole):
        _add_products(out_RC, zip(x_RH.pieces, w_CH.pieces, strict=True), new=True)
    else:
        _add_product(out_RC, x_RH.whole, w_CH.whole.t(), new=True)


def add_hidden_grad(total_RH: Tensor, dlogits_RC: Tensor, w_CH: Operand, *, new: bool) -> None:
    """`total += dlogits @ w`, total in float32; `new`: whatever lies there is overwritten."""
    if uses_onednn(dlogits_RC):
        columns = (piece.contiguous() for piece in dlogits_RC.split(PIECE, 1))
        pairs = ((d, w.t()) for d, w in zip(columns, w_CH.whole.split(PIECE), strict=True))
        _add_products(total_RH, pairs, new=new)
    else:
        _add_product(total_RH, dlogits_RC, w_CH.whole, new=new)


def add_weight_grad(total_CH: Tensor, dlogits_RC: Tensor, x_RH: Operand, *, new: bool) -> None:
    """`total += dlogits.T @ x`, total in float32; `new`: whatever lies there is overwritten, and `total` may have the
    operands' dtype."""
    if uses_onednn(x_RH.whole):
        pairs = zip(dlogits_RC.split(PIECE), x_RH.whole.split(PIECE), strict=True)
        _add_products(total_CH, ((d.t(), part.t()) for d, part in pairs), new=new)
    else:
        _add_product(total_CH, dlogits_RC.t(), x_RH.whole, new=new)


def _add_products(total: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], *, new: bool) -> None:
    """`total += sum of a @ b.T`. Both are contiguous or transposes of such: oneDNN crawls on other strides."""
    for a, b in pairs:
        part = product(a, b)
        if new:
            total.copy_(part)
        else:
            total.add_(part)
        new = False


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, new: bool) -> None:
    """`total += a @ b`, without a copy or a conversion of the result."""
    if total.dtype == a.dtype:
        if new:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif new:
        torch.ops.aten.mm.dtype_out(a, b, total.dtype, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
