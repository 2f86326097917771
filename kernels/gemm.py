"""The three matrix products of the fused log-probability, with float32 accumulation, on CPU and GPU.

Each writes its result directly to its destination. On a CPU all operands are float32; on a GPU they may be narrower.
Shape suffixes: R rows, C vocabulary columns, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.cpu.linear import product, uses_onednn

# Terms that oneDNN's float32 product sums in one chain; with more, it is less accurate than other BLAS libraries.
PIECE = 128


class Operand:
    """A contiguous matrix [rows, K] that several products read, with its pieces along K, which are cut once."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole.contiguous()

    @functools.cached_property
    def pieces(self) -> list[Tensor]:
        return [piece.contiguous() for piece in self.whole.split(PIECE, 1)]


def widened(x: Tensor) -> Tensor:
    """Return the operand in float32 on a CPU, which has no product of half-precision operands with a float32 result;
    unchanged on a GPU."""
    return x if x.is_cuda else x.float()


def logits_tile(x_RH: Operand, w_CH: Operand, out_RC: Tensor) -> None:
    """Compute `out = x @ w.T` in float32."""
    if uses_onednn(x_RH.whole):
        _add_products(out_RC, zip(x_RH.pieces, w_CH.pieces, strict=True), new=True)
    else:
        _add_product(out_RC, x_RH.whole, w_CH.whole.t(), new=True)


def add_hidden_grad(total_RH: Tensor, dlogits_RC: Tensor, w_CH: Operand, *, new: bool) -> None:
    """Compute `total += dlogits @ w` with a float32 total. `new`: overwrite `total` instead of adding to it."""
    if uses_onednn(dlogits_RC):
        columns = (piece.contiguous() for piece in dlogits_RC.split(PIECE, 1))
        pairs = ((d, w.t()) for d, w in zip(columns, w_CH.whole.split(PIECE), strict=True))
        _add_products(total_RH, pairs, new=new)
    else:
        _add_product(total_RH, dlogits_RC, w_CH.whole, new=new)


def add_weight_grad(total_CH: Tensor, dlogits_RC: Tensor, x_RH: Operand, *, new: bool) -> None:
    """Compute `total += dlogits.T @ x` with a float32 total. `new`: overwrite `total` instead, which may then have the
    operands' dtype."""
    if uses_onednn(x_RH.whole):
        pairs = zip(dlogits_RC.split(PIECE), x_RH.whole.split(PIECE), strict=True)
        _add_products(total_CH, ((d.t(), part.t()) for d, part in pairs), new=new)
    else:
        _add_product(total_CH, dlogits_RC.t(), x_RH.whole, new=new)


def _add_products(total: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], *, new: bool) -> None:
    """Compute `total += sum of a @ b.T`. Each operand is contiguous or the transpose of a contiguous one: oneDNN is
    very slow with other strides."""
    for a, b in pairs:
        part = product(a, b)
        if new:
            total.copy_(part)
        else:
            total.add_(part)
        new = False


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, new: bool) -> None:
    """Compute `total += a @ b`, without a copy or a conversion of the result."""
    if total.dtype == a.dtype:
        if new:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif new:
        torch.ops.aten.mm.dtype_out(a, b, total.dtype, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
