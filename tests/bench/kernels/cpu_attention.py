"""Causal attention of one document forward and backward on a CPU, ours in C and torch's, in turns; one thread.

    python -m tests.bench.kernels.cpu_attention [--heads 4 --kv-heads 2 --size 32] [--lengths 144 300 460 720]

The floor is a matrix product of as many operations at the speed that a large one has in the same process. The last line
is one JSON object: ms, lowest of the turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cpu import packed_attention

TURNS, REPEATS = 7, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[144, 300, 460, 720])
    options = parser.parse_args()
    torch.set_num_threads(1)
    gflops = 2 * 2048 * 512**2 / fastest({"gemm": product()})["gemm"] / 1e6
    found: dict[str, Any] = {"gemm_gflops": round(gflops, 1), "documents": {}}
    for length in options.lengths:
        ms = fastest(contestants(options.heads, options.kv_heads, options.size, length))
        work = 3.5 * 2 * length**2 * options.heads * options.size  # two products forward, five backward, half of each
        floor = work / gflops / 1e6
        found["documents"][length] = {k: round(v, 3) for k, v in ms.items()} | {"floor_ms": round(floor, 3)}
        print(f"{length} tokens: {found['documents'][length]}", flush=True)
    print(json.dumps(found))
    return 0


def product() -> Callable[[], object]:
    a, b = torch.randn(2048, 512), torch.randn(512, 512)
    return lambda: a @ b


def contestants(heads: int, kv_heads: int, size: int, length: int) -> dict[str, Callable[[], object]]:
    shapes = (heads, length, size), (kv_heads, length, size), (kv_heads, length, size)
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    grad, documents = torch.randn(length, heads, size), packed_attention.whole_documents(((1, length),), True)
    scale, turned = size**-0.5, grad.transpose(0, 1)[None].contiguous()

    def by_torch() -> torch.Tensor:
        parts = query[None], key[None], value[None]
        return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=heads != kv_heads)

    def ours() -> torch.Tensor:
        return packed_attention.attend(query, key, value, documents, scale)

    def without_gradient(compute: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return torch.no_grad()(compute)

    return {
        "torch_forward": without_gradient(by_torch),
        "forward": without_gradient(ours),
        "torch": lambda: by_torch().backward(turned),
        "ours": lambda: ours().backward(grad),
    }


def fastest(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """ms of processor time of each, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(REPEATS):
                call()
            best[name] = min(best[name], (time.process_time() - start) / REPEATS * 1e3)
    return best


if __name__ == "__main__":
    raise SystemExit(main())
