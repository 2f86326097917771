"""GELU by the hyperbolic tangent on a CPU, with gradients, in C; torch takes three to five times as long in float32."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.cpu.library import built, is_supported

_CLASSES = ("GELUTanh", "PytorchGELUTanh")  # class names in transformers


def gelu_tanh(x: Tensor) -> Tensor:
    """Return x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel, 2016, section 2), of any shape.

    It is computed in C for float32 on a CPU, otherwise and in graphs that torch compiles by torch. An element's result
    does not depend on its position.
    """
    if torch.compiler.is_compiling() or not is_supported(x):
        return F.gelu(x, approximate="tanh")
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Gelu.apply(x)
        return out
    return _forward(x.contiguous())


def use_fast_gelu(model: nn.Module) -> None:
    """Make every GELU of this kind in a model of transformers use `gelu_tanh`."""
    for module in model.modules():
        if type(module).__name__ in _CLASSES and _is_known(module):
            module.forward = MethodType(_replaced, module)


def _replaced(_: nn.Module, input: Tensor) -> Tensor:
    return gelu_tanh(input)


def _is_known(module: nn.Module) -> bool:
    with torch.device("cpu"):
        x = torch.linspace(-4, 4, 9)
    return torch.allclose(module(x), F.gelu(x, approximate="tanh"))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad, for_x = grad.contiguous(), torch.empty_like(x)
        built().gelu_backward(x.data_ptr(), grad.data_ptr(), *_shape(x), for_x.data_ptr())
        return for_x


def _forward(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    built().gelu(x.data_ptr(), *_shape(x), out.data_ptr())
    return out


def _shape(x: Tensor) -> tuple[int, int, int]:
    """Return the number of rows, their width, and the number of threads."""
    width = x.shape[-1] if x.ndim else 1
    return x.numel() // max(width, 1), width, torch.get_num_threads()
