"""RMSNorm and the rotary embedding in float32 on a CPU, in fewer passes over memory than operator by operator.

Shape suffixes: R = rows (tokens, or tokens and heads), D = values of a row.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def _fits(x: Tensor) -> bool:
    """A compiler fuses the plain operators itself."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return (x * scale).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_D, scale = ctx.saved_tensors
        for_x = for_weight = None
        products_RD = (grad * x).reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[0]:
            along = (products_RD @ weight_D).view_as(scale).mul_(scale.pow(3)).div_(-x.shape[-1])
            for_x = (grad * weight_D).mul_(scale).addcmul_(x, along)
        if ctx.needs_input_grad[1]:
            for_weight = products_RD.t() @ scale.flatten()
        return for_x, for_weight, None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (lower, upper), (sin_lower, sin_upper) = x.chunk(2, -1), sin.chunk(2, -1)
        out = x * cos
        out_lower, out_upper = out.chunk(2, -1)
        out_lower.addcmul_(upper, sin_lower, value=-1)
        out_upper.addcmul_(lower, sin_upper)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (lower, upper), (sin_lower, sin_upper) = grad.chunk(2, -1), sin.chunk(2, -1)
        out = grad * cos
        out_lower, out_upper = out.chunk(2, -1)
        out_lower.addcmul_(upper, sin_upper)
        out_upper.addcmul_(lower, sin_lower, value=-1)
        return out, None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] by the rotary embedding, whose cos and sin [..., D] get no gradient: place i turns with i + D/2."""
    if _fits(x):
        out: Tensor = _Turned.apply(x, cos, sin)
        return out
    lower, upper = x.chunk(2, -1)
    return x * cos + torch.cat((-upper, lower), -1) * sin


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    if _fits(hidden_states):
        out: Tensor = _RmsNorm.apply(hidden_states, module.weight, module.variance_epsilon)
        return out
    plain: Tensor = type(module).forward(module, hidden_states)
    return plain


def use_fast_norms(model: nn.Module) -> None:
    """Makes every RMSNorm of a model of transformers compute so where it can."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_forward, module)
