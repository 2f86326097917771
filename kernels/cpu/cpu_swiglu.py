"""SwiGLU's product on a CPU, with gradients, in C: one pass over memory in each direction. Torch makes several and also
keeps silu(gate)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.layer import silu_mul
from kernels.cpu.library import built, is_supported
from kernels.gated import gated_product

__all__ = ["is_supported", "swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., width] (Shazeer, 2020, equation 6, without its matrix products); float32.

    An element's result does not depend on its position. Call it only if `is_supported(gate, up)`.
    """
    return gated_product(gate, up, _multiply, _multiply_grad)


def _multiply(gate: Tensor, up: Tensor) -> Tensor:
    return silu_mul(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)


def _multiply_grad(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    for_gate, for_up = torch.empty_like(gate), torch.empty_like(up)
    shape = gate[..., 0].numel(), gate.shape[-1], torch.get_num_threads()
    given = (tensor.data_ptr() for tensor in (gate, up, grad))
    built().silu_mul_backward(*given, *shape, for_gate.data_ptr(), for_up.data_ptr(), None)
    return for_gate, for_up
