"""RMS norms of rows, rotary embeddings of heads, and both at once on a CPU, with gradients, in C.

Each is one pass over memory in each direction; torch makes several.

Suffixes: N = rows, H = heads, D = head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.cpu.library import MAX_HEAD, built, is_supported
from kernels.heads import by_token

__all__ = ["add_rms_norm", "apply_rope", "rms_norm", "rms_norm_rope", "supports_rms_norm", "supports_rope"]
_BLOCK_ROWS = 64  # same value as in norm.c


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x [..., width]: x / sqrt(mean square + eps) * weight [width] (Zhang and Sennrich, 2019,
    equation 4); float32.

    A row's result does not depend on the other rows. Call it only if `supports_rms_norm`.
    """
    out: Tensor = _RmsNorm.apply(x.unsqueeze(-2), weight, eps, None, None)
    return out.squeeze(-2)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, or x if delta is None; its `rms_norm`), all [..., width]. The backward sums both gradients in
    the same pass."""
    total, out = _AddRmsNorm.apply(x, delta, weight, eps)
    return total, out


def rms_norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise each head of x [1, N, H, D] with weight [D] and rotate it by its token's cos and sin [1, N, D] (Su et
    al., 2021, equation 34, with pairs formed from the two halves); float32.

    Angles get no gradient. Call it only if `supports_rope`.
    """
    out: Tensor = _RmsNorm.apply(x, weight, eps, cos, sin)
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [N, H, D] by their token's cos and sin [N, D], as `rms_norm_rope` does. A strided view of tokens'
    heads is read without a copy."""
    out: Tensor = _Rope.apply(x, cos, sin)
    return out


def supports_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `rms_norm` supports these tensors."""
    return is_supported(x, weight)


def supports_rope(x: Tensor, weight: Tensor | None, cos: Tensor) -> bool:
    """Tell whether `rms_norm_rope`, or `apply_rope` if weight is None, supports these tensors. The sines must be like
    the cosines."""
    return x.shape[-1] <= MAX_HEAD and x.shape[-1] % 2 == 0 and is_supported(x, x if weight is None else weight, cos)


class _RmsNorm(torch.autograd.Function):
    """RMS norm and rotation of x [..., H, D]. Weight and scale apply to heads, the angles, if given, to tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x, angles = x.contiguous(), tuple(None if part is None else part.contiguous() for part in (cos, sin))
        out, scale = _norm(x, None, weight, eps, angles, None)
        ctx.save_for_backward(x, weight, scale, *angles)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for_x, for_weight = _norm_grad(ctx.saved_tensors, grad, None)
        return for_x, for_weight.sum(0) if ctx.needs_input_grad[1] else None, None, None, None


class _AddRmsNorm(torch.autograd.Function):
    """Sum of x and delta [..., D], and its RMS norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total = x if delta is None else torch.empty_like(x)
        added = None if delta is None else delta.contiguous()
        out, scale = _norm(x.unsqueeze(-2), added, weight, eps, (None, None), total)
        ctx.save_for_backward(total, weight, scale)
        return total, out.squeeze(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors  # accessed once: recomputed activations cannot be read twice
        saved = total.unsqueeze(-2), weight, scale, None, None
        for_x, for_weight = _norm_grad(saved, grad, for_total.contiguous())
        for_x = for_x.squeeze(-2)
        needs_delta, needs_weight = ctx.needs_input_grad[1:3]
        return for_x, for_x if needs_delta else None, for_weight.sum(0) if needs_weight else None, None


def _norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, angles: tuple[Tensor | None, ...], total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate x [..., H, D], or x + delta, which is written to `total`; return the result and each head's
    scale."""
    out, scale = torch.empty_like(x), x.new_empty(x.shape[:-1])
    given = x.data_ptr(), _pointer(delta), weight.data_ptr(), eps, *map(_pointer, angles)
    built().rms_norm(*given, *_shape(x), _pointer(total), out.data_ptr(), scale.data_ptr())
    return out, scale


def _norm_grad(saved: tuple[Tensor | None, ...], grad: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of x plus `beside`, if given, and the parts of the weight's gradient. `saved`: x, weight,
    scale and angles."""
    x, weight, *_ = saved
    assert x is not None and weight is not None
    grad, for_x = grad.contiguous(), torch.empty_like(x)
    for_weight = x.new_empty(-(-_shape(x)[0] // _BLOCK_ROWS), len(weight))
    given = map(_pointer, (*saved, grad, beside))
    built().rms_norm_backward(*given, *_shape(x), for_x.data_ptr(), for_weight.data_ptr())
    return for_x, for_weight


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, back=True), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    out, heads_NHD = torch.empty(x.shape), by_token(x)
    angles = cos.data_ptr(), sin.data_ptr()
    built().turn_tokens(heads_NHD.data_ptr(), heads_NHD.stride(0), *angles, *_shape(x), back, out.data_ptr())
    return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    """Return the numbers of tokens and heads, the head size, and the number of threads."""
    heads, size = x.shape[-2:]
    return x.numel() // (heads * size), heads, size, torch.get_num_threads()
