"""The three matrix products of the fused log-probability, each with fp32 accumulation, on CPU and GPU.

On a CPU all operands are float32; on a GPU the operands may be narrower, results and sums are float32.
Shape suffixes: R rows, C vocabulary columns, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.cpu_linear import fits_onednn, product

PIECE = 128  # terms that the CPU's float32 product sums in one chain; more of them lose digits against other BLAS


class Operand:
    """A contiguous matrix [rows, K] that is read by several products, and its pieces along K, cut once."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole.contiguous()

    @functools.cached_property
    def pieces(self) -> list[Tensor]:
        return [piece.contiguous() for piece in self.whole.split(PIECE, 1)]


def _sum_of_products(pairs: Iterable[tuple[Tensor, Tensor]], total: Tensor | None = None) -> Tensor:
    """`total + sum of a @ b.T`. Both are contiguous or transposes of such: oneDNN crawls on other strides."""
    for a, b in pairs:
        part = product(a, b)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def logits_tile(x_RH: Operand, w_CH: Operand) -> Tensor:
    """`x @ w.T` in float32. On some CPUs oneDNN is up to twice as fast as torch.mm, and never much slower."""
    if fits_onednn(x_RH.whole):
        return _sum_of_products(zip(x_RH.pieces, w_CH.pieces, strict=True))
    if x_RH.whole.dtype == torch.float32:
        return torch.mm(x_RH.whole, w_CH.whole.t())
    return torch.mm(x_RH.whole, w_CH.whole.t(), out_dtype=torch.float32)


def add_hidden_grad(total_RH: Tensor, dlogits_RC: Tensor, w_CH: Operand) -> None:
    """`total += dlogits @ w`, total in float32."""
    if fits_onednn(dlogits_RC):
        columns = (piece.contiguous() for piece in dlogits_RC.split(PIECE, 1))
        _sum_of_products(((d, w.t()) for d, w in zip(columns, w_CH.whole.split(PIECE), strict=True)), total_RH)
    elif dlogits_RC.dtype == torch.float32:
        total_RH.addmm_(dlogits_RC, w_CH.whole)
    else:
        torch.ops.aten.addmm.dtype_out(total_RH, dlogits_RC, w_CH.whole, torch.float32, out=total_RH)


def weight_grad(dlogits_RC: Tensor, x_RH: Operand, total_CH: Tensor | None, *, only: bool) -> Tensor:
    """`dlogits.T @ x + total` in float32, or in the operands' dtype when this product is the `only` one of its sum."""
    d_CR, x = dlogits_RC.t(), x_RH.whole
    if fits_onednn(x):
        pairs = zip(dlogits_RC.split(PIECE), x.split(PIECE), strict=True)
        return _sum_of_products(((d.t(), part.t()) for d, part in pairs), total_CH)
    if x.dtype == torch.float32:
        return torch.mm(d_CR, x) if total_CH is None else total_CH.addmm_(d_CR, x)
    if total_CH is None:
        return torch.mm(d_CR, x) if only else torch.mm(d_CR, x, out_dtype=torch.float32)
    return torch.ops.aten.addmm.dtype_out(total_CH, d_CR, x, torch.float32, out=total_CH)
