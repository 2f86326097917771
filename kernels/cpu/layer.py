"""The parts of a decoder layer that torch computes slowly on a CPU, in C, for the embedded engine.

They are attention of single tokens to their cache, norms, rotation and SwiGLU; float32, no gradient.

Suffixes: N = tokens, H = query heads, K = key heads, D = head size, C = entries of a slot.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.cpu.library import built


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `hidden` [..., width] in place; return the RMS norm of the sum, times weight [width]."""
    normed = torch.empty_like(hidden)
    added = None if delta is None else delta.data_ptr()
    pointers = hidden.data_ptr(), added, weight.data_ptr()
    shape = hidden.numel() // len(weight), len(weight)
    built().add_rms_norm(*pointers, eps, *shape, torch.get_num_threads(), normed.data_ptr())
    return normed


def silu_mul(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, [N, width], contiguous. The rows of gate and up [N, width] must have the same stride."""
    if out is None:
        out = gate.new_empty(gate.shape)
    pointers = gate.data_ptr(), up.data_ptr()
    built().silu_mul(*pointers, gate.stride(0), *gate.shape, torch.get_num_threads(), out.data_ptr())
    return out


def rotate_and_store(
    heads: Tensor,
    norms: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor],
    entry: Tensor,
    cache: tuple[Tensor, Tensor],
) -> None:
    """Normalise and rotate the queries of `heads` [N, H + 2 K, D] in place; write the normalised and rotated keys, and
    the values, to the cache.

    `norms`: weights [H + K, D] of the norms of queries and keys, None for a family without them; `angles`: cosine and
    sine [N, D]; `entry`: int64 [N], the index of a token's first head in the cache [slots, K, C, D] viewed as [slots *
    K * C, D], -1 for a token that is not kept.
    """
    keys, values = cache
    num_kv, context, size = keys.shape[1:]
    n, num_all = heads.shape[:2]
    shape = n, num_all - 2 * num_kv, num_kv, size
    weights = None if norms is None else norms.data_ptr()
    where = angles[0].data_ptr(), angles[1].data_ptr(), entry.data_ptr(), context, torch.get_num_threads()
    built().rotate_and_store(heads.data_ptr(), *shape, weights, eps, *where, keys.data_ptr(), values.data_ptr())


def rotate_heads(heads: Tensor, num_turned: int, angles: tuple[Tensor, Tensor]) -> None:
    """Rotate the first `num_turned` heads of each token of `heads` [B, P, heads, D] in place. `angles`: cosine and sine
    of the P positions, [P, D]."""
    cos, sin = angles
    batch, positions, num_heads, size = heads.shape
    shape = batch * positions, num_heads, num_turned, size
    where = cos.data_ptr(), sin.data_ptr(), positions
    built().rotate_heads(heads.data_ptr(), *shape, *where, torch.get_num_threads())


def attend(heads: Tensor, first: Tensor, length: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Compute attention of the first R tokens of rotated `heads` [N, H + 2 K, D] to their slots; write it to `out` [N,
    H, D].

    Token r attends to `length[r]` entries from index `first[r]` on, both int64 [R], with indices as in
    `rotate_and_store`.
    """
    keys, values = cache
    num_kv, context, size = keys.shape[1:]
    num_heads = heads.shape[1] - 2 * num_kv
    shape = heads.stride(0), len(first), num_heads, num_kv, size
    stored = keys.data_ptr(), values.data_ptr(), 1 / math.sqrt(size)
    seen = first.data_ptr(), length.data_ptr(), context
    built().attend(heads.data_ptr(), *shape, *seen, *stored, torch.get_num_threads(), out.data_ptr())


def attend_causally(heads: Tensor, slot: int, past: int, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Compute causal attention of one sequence's tokens, rotated `heads` [N, H + 2 K, D], to its slot; write it to
    `out` [N, H, D].

    The slot holds `past` earlier tokens, then these tokens; each attends up to itself.
    """
    keys, values = (stored[slot].transpose(0, 1) for stored in cache)
    _attend_together(heads, keys, values, (past + 1, 1), 1 / math.sqrt(heads.shape[2]), out)


def attend_all(heads: Tensor, scale: float) -> Tensor:
    """Compute attention of an image's patches to all of its patches: return [P, H * D]. `heads` [P, 3 H, D]: rotated
    queries and keys, and values."""
    query, keys, values = heads.chunk(3, dim=1)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend_together(query, keys, values, (len(heads), 0), scale, out)
    return out.flatten(1)


def _attend_together(
    query: Tensor, keys: Tensor, values: Tensor, seen: tuple[int, int], scale: float, out: Tensor
) -> None:
    """Compute attention of query [N, H or more, D] to keys and values [as many as are seen, or more, K, D]; write it to
    out [N, H, D].

    `seen`: number of keys that the first token attends to, and how many more each next token does.
    """
    shape = query.stride(0), *out.shape[:2], keys.shape[1], out.shape[2]
    stored = keys.data_ptr(), *keys.stride()[:2], values.data_ptr(), *values.stride()[:2]
    threads = torch.get_num_threads()
    built().attend_together(query.data_ptr(), *shape, *seen, *stored, scale, threads, out.data_ptr())
