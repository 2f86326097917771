"""RMSNorm, the rotary embedding and SwiGLU in float32 on a CPU, in fewer passes over memory than operator by operator:
in one, by C, where no gradient is wanted.

Shape suffixes: R = rows (tokens, or tokens and heads), D = values of a row.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation

from kernels import cpu_layer


def _fits(x: Tensor) -> bool:
    """A compiler fuses the plain operators itself."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _fits_c(*tensors: Tensor) -> bool:
    """Whether one pass in C does: of what comes with no gradient, row after row."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return all(x.is_contiguous() for x in tensors) and cpu_layer.computes(*tensors)


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
    by_token, angles = x.transpose(1, 2), (cos[0, 0], sin[0, 0])
    if cos.shape[:2] == (1, 1) and _fits_c(by_token, cos, sin):
        rotated = torch.empty_like(by_token)
        cpu_layer.rotate_heads(by_token, by_token.shape[2], angles, rotated)
        return rotated.transpose(1, 2)
    if _fits(x):
        out: Tensor = _Turned.apply(x, cos, sin)
        return out
    lower, upper = x.chunk(2, -1)
    return x * cos + torch.cat((-upper, lower), -1) * sin


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    if _fits_c(hidden_states, module.weight):
        return cpu_layer.add_rms_norm(hidden_states, None, module.weight, module.variance_epsilon)
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


def _gated(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    if _fits_c(gate, up):
        inner = cpu_layer.silu_mul(gate.flatten(0, -2), up.flatten(0, -2)).view_as(gate)
    else:
        inner = module.act_fn(gate) * up
    out: Tensor = module.down_proj(inner)
    return out


def use_fast_gates(model: nn.Module) -> None:
    """Makes every SwiGLU of a model of transformers compute so where it can."""
    for module in model.modules():
        if all(hasattr(module, f"{name}_proj") for name in ("gate", "up", "down")) and _is_silu(module):
            module.forward = MethodType(_gated, module)


def _is_silu(module: Any) -> bool:
    return isinstance(getattr(module, "act_fn", None), (nn.SiLU, SiLUActivation))
