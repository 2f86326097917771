"""Attention of packed documents on a CPU, with gradients, in C. In float32 it takes half to three quarters of torch's
time (docs/figures/kernels.md).

Suffixes: N = queries, T = keys, H = query heads, K = key heads, D = head size, P = documents.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.cpu.library import built, supports_layer

__all__ = ["Documents", "attend", "supports_layer", "whole_documents"]


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The keys that each query attends to: the first `seen` of its document, never fewer than for the document's
    previous query."""

    borders: Tensor  # int64 [P, 3]: first query, number of queries, first key
    seen: Tensor  # int64 [N]


@functools.lru_cache(maxsize=64)
def whole_documents(runs: tuple[tuple[int, int], ...], causal: bool) -> Documents:
    """Return the description of consecutive documents in which every token has a query.

    `runs`: (number of documents, their length) for each run of neighbours with equal length.
    """
    counts = torch.tensor([length for many, length in runs for _ in range(many)], dtype=torch.int64)
    first = counts.cumsum(0) - counts
    seen = counts.repeat_interleave(counts)
    if causal:
        seen = torch.arange(len(seen)) - first.repeat_interleave(counts) + 1
    return Documents(torch.stack((first, counts, first), 1), seen)


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float) -> Tensor:
    """Compute attention of query [H, N, D] to key and value [K, T, D], float32, with any strides; D is a multiple of 8.
    Return [N, H, D].

    A query's and head's result does not depend on other documents or the number of threads. Call it only if
    `supports_layer`.
    """
    out: Tensor = _Attention.apply(query, key, value, documents.borders, documents.seen, scale)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, seen: Tensor, scale: float
    ) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        heads, rows, size = query.shape
        out, log_sum = query.new_empty(rows, heads, size), query.new_empty(rows, heads)
        built().attend_pieces(*_arguments(query, key, value, borders, seen, scale), out.data_ptr(), log_sum.data_ptr())
        ctx.save_for_backward(query, key, value, borders, seen, out, log_sum)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, borders, seen, out, log_sum = ctx.saved_tensors
        grad_out, (kv_heads, tokens, size) = grad_out.contiguous(), key.shape
        for_query = torch.empty_like(out)
        for_key, for_value = key.new_zeros(2, tokens, kv_heads, size)
        given = (x.data_ptr() for x in (out, log_sum, grad_out, for_query, for_key, for_value))
        built().attend_pieces_backward(*_arguments(query, key, value, borders, seen, ctx.scale), *given)
        return *(x.transpose(0, 1) for x in (for_query, for_key, for_value)), None, None, None


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, seen: Tensor, scale: float
) -> tuple[int | float, ...]:
    """Return the common arguments of the two C functions."""
    heads, _, size = query.shape
    queries = query.data_ptr(), query.stride(1), query.stride(0), heads, len(key), size
    packing = borders.data_ptr(), len(borders), seen.data_ptr()
    read = (part for x in (key, value) for part in (x.data_ptr(), x.stride(1), x.stride(0)))
    return *queries, *packing, *read, scale, torch.get_num_threads()
