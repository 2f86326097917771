"""The three matrix products of the fused log-probability, each with fp32 accumulation, on CPU and GPU.

Shape suffixes: R rows, C vocabulary columns, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

PIECE = 128  # terms that the CPU's float32 product sums in one chain; more of them lose digits against other BLAS


@functools.cache
def _has_onednn() -> bool:
    vectorised = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return bool(vectorised) and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _use_onednn(dtype: torch.dtype) -> bool:
    """In float32 oneDNN is up to twice as fast as the BLAS behind torch.mm on some CPUs, and never much slower."""
    return dtype == torch.float32 and bool(torch.backends.mkldnn.enabled) and _has_onednn()


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
        product = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def logits_tile(x_RH: Operand, w_CH: Operand, dtype: torch.dtype) -> Tensor:
    """`x @ w.T` in `dtype` (that of the operands, or float32); accumulated in float32 either way."""
    if not x_RH.whole.is_cuda and _use_onednn(x_RH.whole.dtype):
        return _sum_of_products(zip(x_RH.pieces, w_CH.pieces, strict=True))
    if dtype == x_RH.whole.dtype:
        return torch.mm(x_RH.whole, w_CH.whole.t())
    return torch.mm(x_RH.whole, w_CH.whole.t(), out_dtype=dtype)


def add_hidden_grad(total_RH: Tensor, dlogits_RC: Tensor, w_CH: Operand) -> None:
    """`total += dlogits @ w`, total in float32."""
    if not total_RH.is_cuda and _use_onednn(dlogits_RC.dtype):
        columns = (piece.contiguous() for piece in dlogits_RC.split(PIECE, 1))
        _sum_of_products(((d, w.t()) for d, w in zip(columns, w_CH.whole.split(PIECE), strict=True)), total_RH)
    elif dlogits_RC.dtype == total_RH.dtype:
        total_RH.addmm_(dlogits_RC, w_CH.whole)
    elif total_RH.is_cuda:
        torch.ops.aten.addmm.dtype_out(total_RH, dlogits_RC, w_CH.whole, total_RH.dtype, out=total_RH)
    else:
        total_RH.add_(torch.mm(dlogits_RC, w_CH.whole))


def weight_grad(dlogits_RC: Tensor, x_RH: Operand, total_CH: Tensor | None, last: bool) -> Tensor:
    """`dlogits.T @ x + total`: in float32, or in the operands' dtype when one product is the whole sum."""
    d_CR, x = dlogits_RC.t(), x_RH.whole
    if not x.is_cuda and _use_onednn(x.dtype):
        pairs = zip(dlogits_RC.split(PIECE), x.split(PIECE), strict=True)
        return _sum_of_products(((d.t(), part.t()) for d, part in pairs), total_CH)
    if total_CH is not None and x.dtype == torch.float32:
        return total_CH.addmm_(d_CR, x)
    if last or x.dtype == torch.float32:
        return torch.mm(d_CR, x)
    if not x.is_cuda:
        part = torch.mm(d_CR, x).float()
        return part if total_CH is None else total_CH.add_(part)
    if total_CH is None:
        return torch.mm(d_CR, x, out_dtype=torch.float32)
    return torch.ops.aten.addmm.dtype_out(total_CH, d_CR, x, torch.float32, out=total_CH)
