"""SwiGLU's product on a GPU, with gradients, as Triton kernels: one pass over memory in each direction. Torch makes
several and also keeps silu(gate)."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated import gated_product
from kernels.gpu.launches import is_supported, jit

__all__ = ["is_supported", "swiglu"]
LAUNCH = {"BLOCK": 2048, "num_warps": 4}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., width] (Shazeer, 2020, equation 6, without its matrix products), computed in
    float32 and rounded once to their dtype. Call it only if `is_supported(gate, up)`."""
    return gated_product(gate, up, _product, _product_grad)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        _multiply[_grid(gate)](gate, up, out, gate.numel(), **LAUNCH)
    return out


def _product_grad(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    for_gate, for_up = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device_of(gate):
        _multiply_grad[_grid(gate)](gate, up, grad, for_gate, for_up, gate.numel(), **LAUNCH)
    return for_gate, for_up


def _grid(tensor: Tensor) -> tuple[int]:
    return (max(1, triton.cdiv(tensor.numel(), LAUNCH["BLOCK"])),)


@jit()
def _multiply(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@jit()
def _multiply_grad(gate_ptr, up_ptr, grad_ptr, for_gate_ptr, for_up_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    for_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(for_gate_ptr + at, for_gate.to(for_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(for_up_ptr + at, (grad * gate * share).to(for_up_ptr.dtype.element_ty), mask=inside)
