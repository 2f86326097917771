"""Checks of norms, rotations of heads and gated products against torch in float64, for any implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

EXACT = 2e-6  # relative error of a number, or of the largest one if sums cancel


def check(
    ours: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    once: float,
    *,
    sums: bool = True,
) -> None:
    """Check that output and gradients of `inputs` equal those of `exact` in float64, up to one rounding with the
    relative error `once`."""
    results = []
    for function, wide in ((ours, False), (exact, True)):
        own = [(part.double() if wide else part).detach().requires_grad_() for part in inputs]
        out = function(*own)
        results.append((out.detach(), *torch.autograd.grad(out, own, grad.to(out.dtype))))
    for value, truth in zip(*results, strict=True):
        assert value.shape == truth.shape and value.dtype == inputs[0].dtype
        least = EXACT * truth.abs().max() if sums else 1e-6
        assert ((value.double() - truth).abs() <= (once + EXACT) * truth.abs() + least).all()


def rounding(dtype: torch.dtype, *, cuts: bool) -> float:
    """Return the relative error of rounding a number once. `cuts`: it is truncated, as by Triton's interpreter."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps * (1.01 if cuts else 0.51)


def check_norm(kernels: Any, shape: tuple[int, ...], *how: Any, once: float = 0.0) -> None:
    """Check a norm; `how`: device and dtype."""
    x, weight, grad = _drawn(shape, *how), _drawn(shape[-1:], *how), _drawn(shape, *how)
    assert kernels.supports_rms_norm(x, weight)
    check(
        lambda x, weight: kernels.rms_norm(x, weight, 1e-6),
        lambda x, weight: F.rms_norm(x, shape[-1:], weight, 1e-6),
        (x, weight), grad, once,
    )  # fmt: skip


def check_layer_norm(kernels: Any, shape: tuple[int, ...], *how: Any, once: float = 0.0) -> None:
    """Check a layer norm. Rows are around 3, so that subtracting the mean too late would show."""
    x, grad, (weight, bias) = _drawn(shape, *how) + 3, _drawn(shape, *how), _drawn((2, *shape[-1:]), *how)
    assert kernels.supports_layer_norm(x, weight, bias)
    check(
        lambda *own: kernels.layer_norm(*own, 1e-6),
        lambda x, weight, bias: F.layer_norm(x, shape[-1:], weight, bias, 1e-6),
        (x, weight, bias), grad, once,
    )  # fmt: skip


def check_turned_norm(kernels: Any, shape: tuple[int, int, int], *how: Any, once: float = 0.0) -> None:
    """Check a norm followed by the rotation of heads; `shape` is (tokens, heads, head size). The two halves of the
    angles differ here, unlike in any model."""
    x, weight, grad = _drawn((1, *shape), *how), _drawn(shape[-1:], *how), _drawn((1, *shape), *how)
    cos, sin = _drawn((2, 1, shape[0], shape[2]), *how)
    assert kernels.supports_rope(x, weight, cos)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return _turned(F.rms_norm(x, shape[-1:], weight, 1e-6), cos, sin)

    check(lambda x, weight: kernels.rms_norm_rope(x, weight, 1e-6, cos, sin), exact, (x, weight), grad, once)


def check_turned(kernels: Any, shape: tuple[int, int, int], *how: Any, once: float = 0.0) -> None:
    """Check the rotation of the keys, the second of three views of a tower's fused projection, with angles in
    float32."""
    device, _ = how
    qkv, grad = _drawn((shape[0], 3, *shape[1:]), *how), _drawn(shape, *how)
    cos, sin = _drawn((2, shape[0], shape[2]), device, torch.float32)
    assert kernels.supports_rope(qkv[:, 1], None, cos)
    check(
        lambda qkv: kernels.apply_rope(qkv[:, 1], cos, sin),
        lambda qkv: _turned(qkv[None, :, 1], cos[None], sin[None])[0],
        (qkv,), grad, once,
    )  # fmt: skip


def check_swiglu(kernels: Any, shape: tuple[int, ...], *how: Any, once: float = 0.0) -> None:
    """Check SwiGLU with gates from tiny to huge."""
    scale = torch.tensor([1e-3, 1, 10, 50, 200, 1e4, 1])[torch.arange(shape[-2]) % 7][:, None]
    gate, up, grad = _drawn(shape, *how), _drawn(shape, *how), _drawn(shape, *how)
    gate *= scale.to(gate)
    assert kernels.is_supported(gate, up)
    check(kernels.swiglu, lambda gate, up: F.silu(gate) * up, (gate, up), grad, once, sums=False)


def _turned(x_1NHD: Tensor, cos_1ND: Tensor, sin_1ND: Tensor) -> Tensor:
    heads = x_1NHD.transpose(1, 2)
    turned: Tensor = apply_rotary_pos_emb(heads, heads, cos_1ND.double(), sin_1ND.double())[0]
    return turned.transpose(1, 2)


def _drawn(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(device, dtype)
