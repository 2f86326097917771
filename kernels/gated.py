"""SwiGLU's product as a differentiable operation, for any device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Multiply = Callable[[Tensor, Tensor], Tensor]
MultiplyGrad = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def gated_product(gate: Tensor, up: Tensor, multiply: Multiply, multiply_grad: MultiplyGrad) -> Tensor:
    """Return `multiply(gate, up)`, differentiable; `multiply_grad(gate, up, grad)` computes both gradients.

    Both functions get contiguous tensors. Only gate and up are kept for the backward.
    """
    out: Tensor = _GatedProduct.apply(gate, up, multiply, multiply_grad)
    return out


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, multiply: Multiply, multiply_grad: MultiplyGrad) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.multiply_grad = multiply_grad
        return multiply(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *ctx.multiply_grad(*ctx.saved_tensors, grad.contiguous()), None, None
