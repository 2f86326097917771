"""Matrix products on CPUs by oneDNN instead of MKL where that is faster in float32: on AMD with AVX-512.

MKL does not use AVX-512 on AMD and is half as fast there. On Intel, and with only AVX2, both are equally fast for large
matrices, and MKL is faster for small ones: a layer's products for 64 tokens take three quarters of the time
(docs/figures/kernels.md). oneDNN compiles and caches a kernel for each new shape, which takes 0.5 ms and about 0.4 MB;
therefore numbers of rows are padded to few different values.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CPUINFO = Path("/proc/cpuinfo")
_ON_AMD = _CPUINFO.exists() and "AuthenticAMD" in _CPUINFO.read_text()


@functools.cache
def _can_use_onednn() -> bool:
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return bool(wide) and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _linear_pointwise() -> Any:
    """Return the operator's only overload; looking it up for every one of some thousand products per second would cost
    time."""
    return torch.ops.mkldnn._linear_pointwise.default


def uses_onednn(x: Tensor) -> bool:
    """Tell whether oneDNN computes products of `x`: it is the faster library here, available and switched on, and x is
    float32 on a CPU."""
    fits = _ON_AMD and x.device.type == "cpu" and x.dtype == torch.float32 and _can_use_onednn()
    return fits and bool(torch.backends.mkldnn.enabled)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] times weight [out, in] transposed, plus bias, by oneDNN's private operator; no gradient."""
    return _linear_pointwise()(x, weight, bias, "none", [], "")


def padded(rows: int) -> int:
    """Return the number of rows that oneDNN computes for `rows`: the next multiple of 8; of 32 above 64; of 128 above
    512."""
    step = 8 if rows <= 64 else 32 if rows <= 512 else 128
    return -(-rows // step) * step


def _pad(x: Tensor) -> Tensor:
    """Return rows [N, D] padded with rows of zeros."""
    extra = padded(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, extra)) if extra else x.contiguous()


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # x itself, not padded: layers with the same input share it
        ctx.has_bias = bias is not None
        return product(_pad(x), weight.contiguous(), bias)[: len(x)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        below = _pad(grad)
        if ctx.needs_input_grad[0]:
            for_x = product(below, weight.t().contiguous())[: len(grad)]
        if ctx.needs_input_grad[1]:
            for_weight = product(below.t().contiguous(), _pad(x).t().contiguous())
        if ctx.has_bias and ctx.needs_input_grad[2]:
            for_bias = grad.sum(0)
        return for_x, for_weight, for_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`, differentiable, by oneDNN where that is faster."""
    if not uses_onednn(x) or weight.dtype != torch.float32:
        return F.linear(x, weight, bias)
    if torch.is_inference_mode_enabled():
        return product(x, weight, bias)
    return _OneDnnLinear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


class _Linears(torch.autograd.Function):
    """Products of one x with several weights; the matrix products themselves sum the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(torch.mm(x, weight.t()) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = torch.mm(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                for_x.addmm_(grad, weight)
        wanted = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return for_x, *(torch.mm(grad.t(), x) if want else None for grad, want in wanted)


def linears(x: Tensor, *modules: nn.Linear) -> tuple[Tensor, ...]:
    """Return the outputs of all modules for x [..., in]. Call it only if `supports_linears`."""
    outputs = _Linears.apply(x.flatten(0, -2), *(module.weight for module in modules))
    return tuple(out.unflatten(0, x.shape[:-1]) for out in outputs)


def supports_linears(x: Tensor, *modules: nn.Linear) -> bool:
    """Tell whether the modules are plain float32 products on a CPU that MKL computes: no bias, adapter or hooks."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return plain and not uses_onednn(x) and all(map(_is_plain, modules))


def _is_plain(module: nn.Linear) -> bool:
    forward = vars(module).get("forward")
    is_known = forward is None or getattr(forward, "__func__", None) is _forward
    plain = type(module) is nn.Linear and module.bias is None and module.weight.dtype == torch.float32 and is_known
    return plain and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias)


def use_fast_linear(model: nn.Module) -> None:
    """Make every plain nn.Linear of the model compute with `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def use_plain_linear(model: nn.Module) -> None:
    """Undo `use_fast_linear`, for torch.compile, which uses oneDNN itself."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is _forward:
            del module.forward
