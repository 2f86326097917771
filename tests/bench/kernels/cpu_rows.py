"""Norms, norms of heads with their rotation, and SwiGLU on a CPU, ours in C and torch's, in turns, forward and
backward; one thread.

    python -m tests.bench.kernels.cpu_rows [--tokens 8192] [--heads 4 --size 32] [--width 128] [--gate 384]

The floor is what must be read and written once, at the speed of torch's copy in the same process: forward, the inputs
and the output; backward, the inputs, the gradient and the gradients of the inputs. The last line is one JSON object:
ms, lowest of the turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

from kernels.cpu import cpu_norm, cpu_swiglu
from tests.bench.kernels.cpu_attention import fastest

EPS = 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="of a norm")
    parser.add_argument("--gate", type=int, default=384, help="width of SwiGLU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    copied = torch.randn(options.tokens, options.gate), torch.empty(options.tokens, options.gate)
    bytes_per_ms = 8 * copied[0].numel() / fastest({"copy": lambda: copied[1].copy_(copied[0])})["copy"]
    heads = options.tokens * options.heads * options.size
    cases = {
        "rms_norm": (norms(options.tokens, options.width), 5 * options.tokens * options.width),
        "rms_norm_rope": (turned(options.tokens, options.heads, options.size), 5 * heads),
        "swiglu": (gates(options.tokens, options.gate), 8 * options.tokens * options.gate),
    }
    found: dict[str, Any] = {"copy_gb_per_s": round(bytes_per_ms / 1e6, 1)}
    for name, (calls, num_floats) in cases.items():
        found[name] = {k: round(v, 3) for k, v in fastest(calls).items()}
        found[name]["floor"] = round(4 * num_floats / bytes_per_ms, 3)
        print(f"{name}: {found[name]}", flush=True)
    print(json.dumps(found))
    return 0


def norms(tokens: int, width: int) -> dict[str, Callable[[], object]]:
    x, weight, grad = torch.randn(tokens, width), torch.randn(width), torch.randn(tokens, width)

    def by_torch(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), weight, EPS)

    return both((x, weight), grad, by_torch, lambda x, weight: cpu_norm.rms_norm(x, weight, EPS))


def turned(tokens: int, heads: int, size: int) -> dict[str, Callable[[], object]]:
    x, weight, grad = torch.randn(1, tokens, heads, size), torch.randn(size), torch.randn(1, tokens, heads, size)
    angle = torch.randn(1, tokens, size // 2).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()

    def by_torch(x: Tensor, weight: Tensor) -> Tensor:
        normed = F.rms_norm(x, (size,), weight, EPS).transpose(1, 2)
        turned: Tensor = apply_rotary_pos_emb(normed, normed[:, :0], cos, sin)[0]
        return turned.transpose(1, 2)

    return both((x, weight), grad, by_torch, lambda x, weight: cpu_norm.rms_norm_rope(x, weight, EPS, cos, sin))


def gates(tokens: int, width: int) -> dict[str, Callable[[], object]]:
    gate, up, grad = torch.randn(3, tokens, width).unbind()
    return both((gate, up), grad, lambda gate, up: F.silu(gate) * up, cpu_swiglu.swiglu)


def both(
    inputs: tuple[Tensor, ...], grad: Tensor, by_torch: Callable[..., Tensor], ours: Callable[..., Tensor]
) -> dict[str, Callable[[], object]]:
    """Forward and backward of each."""
    leaves = tuple(x.clone().requires_grad_() for x in inputs)

    def of(compute: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(compute(*leaves), leaves, grad)

    return {"torch": of(by_torch), "ours": of(ours)}


if __name__ == "__main__":
    raise SystemExit(main())
