"""SwiGLU's MLP on a CPU, with gradients, computed block by block of tokens, so that intermediate tensors stay in the
processor's caches. For the backward only the gate's two inputs are kept for all tokens.

Suffixes: T = tokens, H = hidden size, I = intermediate size, B = tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.cpu import linear
from kernels.cpu.layer import silu_mul
from kernels.cpu.library import built, is_supported

BLOCK_FLOATS, MIN_BLOCK = 1 << 18, 256
"""A block's gates; fewer tokens than `MIN_BLOCK` would read the weights too often."""


def supports_swiglu_mlp(hidden: Tensor, *projections: nn.Linear) -> bool:
    """Tell whether `swiglu_mlp` can replace these linear layers (gate, up and down)."""
    return linear.supports_linears(hidden, *projections) and is_supported(hidden, *(p.weight for p in projections))


def swiglu_mlp(hidden: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """Return (silu(hidden gate^T) * (hidden up^T)) down^T of hidden [..., H] (Shazeer, 2020, equation 6); float32. Call
    it only if `supports_swiglu_mlp`."""
    x_TH, weights = hidden.flatten(0, -2), (gate_IH, up_IH, down_HI)
    tracked = torch.is_grad_enabled() and any(part.requires_grad for part in (x_TH, *weights))
    out: Tensor = _Mlp.apply(x_TH, *weights) if tracked else _forward(x_TH, *weights, None)
    return out.view(*hidden.shape[:-1], len(down_HI))


def _step(width: int) -> int:
    """Return the number of tokens in a block."""
    return max(MIN_BLOCK, BLOCK_FLOATS // width)


def _blocks(tokens: int, width: int) -> Iterator[slice]:
    step = _step(width)
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def _room(count: int, x_TH: Tensor, width: int) -> Tensor:
    """Return buffers that every block overwrites, so that they stay in the caches: [count, B, I]."""
    return x_TH.new_empty(count, min(_step(width), len(x_TH)), width)


def _forward(x_TH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, kept_2TI: Tensor | None) -> Tensor:
    """Compute the MLP: [T, H]. The gate's inputs are written to `kept_2TI`, if given."""
    out_TH, room = x_TH.new_empty(len(x_TH), len(down_HI)), _room(3, x_TH, len(gate_IH))
    for block in _blocks(len(x_TH), len(gate_IH)):
        x_BH = x_TH[block]
        product_BI, *inputs = room[:, : len(x_BH)]
        gate_BI, up_BI = inputs if kept_2TI is None else kept_2TI[:, block]
        torch.mm(x_BH, gate_IH.t(), out=gate_BI)
        torch.mm(x_BH, up_IH.t(), out=up_BI)
        torch.mm(silu_mul(gate_BI, up_BI, out=product_BI), down_HI.t(), out=out_TH[block])
    return out_TH


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
        kept_2TI = x_TH.new_empty(2, len(x_TH), len(gate_IH))
        ctx.save_for_backward(x_TH, gate_IH, up_IH, down_HI, kept_2TI)
        return _forward(x_TH, gate_IH, up_IH, down_HI, kept_2TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, gate_IH, up_IH, down_HI, kept_2TI = ctx.saved_tensors
        grad_TH, weights, wanted = grad_TH.contiguous(), (gate_IH, up_IH, down_HI), ctx.needs_input_grad
        for_x = torch.empty_like(x_TH) if wanted[0] else None
        sums = [torch.zeros_like(w) if need else None for w, need in zip(weights, wanted[1:], strict=True)]
        room = _room(4, x_TH, len(gate_IH))
        for block in _blocks(len(x_TH), len(gate_IH)):
            x_BH, grad_BH = x_TH[block], grad_TH[block]
            pulled_BI, product_BI, for_gate, for_up = room[:, : len(x_BH)]
            torch.mm(grad_BH, down_HI, out=pulled_BI)
            _gate_grad(*kept_2TI[:, block], pulled_BI, for_gate, for_up, product_BI)
            if for_x is not None:
                torch.mm(for_gate, gate_IH, out=for_x[block]).addmm_(for_up, up_IH)
            pairs = (for_gate, x_BH), (for_up, x_BH), (grad_BH, product_BI)
            for total, (outer, inner) in zip(sums, pairs, strict=True):
                if total is not None:
                    total.addmm_(outer.t(), inner)
        return for_x, *sums


def _gate_grad(gate: Tensor, up: Tensor, grad: Tensor, *out: Tensor) -> None:
    """Write the gradients of gate and up, and silu(gate) * up, all [B, I], to `out`."""
    pointers = (tensor.data_ptr() for tensor in (gate, up, grad))
    built().silu_mul_backward(*pointers, *gate.shape, torch.get_num_threads(), *(each.data_ptr() for each in out))
