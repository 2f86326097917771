"""Attention over packed documents, without a T x T mask; learner/model/adapt.py registers it with transformers.

Shape suffixes: T = packed tokens, H = heads, D = head size; documents lie one after another along T.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.parallel.collectives import whole_keys_values
from learner.parallel.layout import Chunk
from learner.parallel.share import Share
from shared.vision import Grid

ROWS_AT_ONCE = 128  # queries that share one mask

_varlen_allowed = True  # of this process, as torch's own choice of kernels is


def use_varlen(allowed: bool) -> None:
    """Whether half precision on a GPU takes torch's variable-length attention; see learner/model/attention_backend"""
    global _varlen_allowed
    _varlen_allowed = allowed


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where documents begin and end. `runs`: neighbours of equal length as (how many, length).

    `windows` is the finer packing of vision blocks that only look inside a window, for towers that have such blocks.
    With a `share`, queries, keys and values are those of its tokens alone, in `chunks`.
    """

    runs: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor  # int32 [documents+1]
    max_length: int
    causal: bool
    windows: Packing | None = None
    share: Share | None = None
    chunks: tuple[PackedChunk, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunk:
    """A chunk of a share, with where its documents' queries and keys begin and end."""

    chunk: Chunk
    cu_queries: Tensor  # int32 [documents+1], from the chunk's start
    cu_keys: Tensor  # int32 [documents+1], from its first key


def packing_of(lengths: tuple[int, ...], *, causal: bool, device: torch.device, share: Share | None = None) -> Packing:
    """`lengths` are those of the whole microbatch, with a `share` too."""
    runs = tuple((len(list(group)), length) for length, group in groupby(lengths))
    parts = [] if share is None else share.chunks
    chunks = tuple(PackedChunk(part, _borders(part.queries, device), _borders(part.keys, device)) for part in parts)
    return Packing(runs, _borders(lengths, device), max(lengths), causal, share=share, chunks=chunks)


def _borders(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)


def window_lengths(grids: Iterable[Grid], *, merge_size: int, window_tokens: int) -> tuple[int, ...]:
    """Patches of each window of images with these grids, in Qwen2.5-VL's order: image by image, row by row.

    A window is a square of `window_tokens` x `window_tokens` visual tokens, smaller at the right and lower edges.
    """
    lengths = []
    for frames, height, width in grids:
        rows, columns = (_pieces(side // merge_size, window_tokens) for side in (height, width))
        lengths += [row * column * merge_size**2 for row in rows for column in columns] * frames
    return tuple(lengths)


def _pieces(side: int, most: int) -> list[int]:
    return [min(most, side - start) for start in range(0, side, most)]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing,
    queries_at: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1,Hq,T,D], key and value [1,Hkv,T,D] -> [1,T,Hq,D]. Documents do not see each other.

    With `queries_at` (int64 [N], ascending) the queries are those of these places alone: [1,Hq,N,D] -> [1,N,Hq,D].
    With a share T and places are its own; it is a collective of the ranks that share the microbatch.
    """
    fast = _varlen_allowed and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if packing.share is not None:
        key, value = whole_keys_values(key, value, packing.share)
        if fast and queries_at is None:
            return of_chunks(query, key, value, scaling, packing.chunks)[None], None
        queries_at = packing.share.places if queries_at is None else packing.share.places[queries_at]
    if queries_at is not None:
        return of_rows(query, key, value, queries_at, scaling, packing)[None], None
    if packing.windows is not None and getattr(module, "looks_through_windows", False):
        packing = packing.windows
    if fast:
        return _varlen(query, key, value, scaling, packing)[None], None
    sizes = [count * length for count, length in packing.runs]
    parts = zip(packing.runs, *(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True)
    outputs = [_run(count, length, q, k, v, scaling, packing.causal) for (count, length), q, k, v in parts]
    return torch.cat(outputs)[None], None


def of_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scaling: float, packing: Packing) -> Tensor:
    """Causal attention of some places, a few of one document at a time: [N,Hq,D]."""
    starts = packing.cu_seqlens.tolist()[:-1]
    lengths = [length for count, length in packing.runs for _ in range(count)]
    counts = torch.searchsorted(rows, packing.cu_seqlens).diff().tolist()
    parts = rows.split(counts), query.split(counts, 2), key.split(lengths, 2), value.split(lengths, 2)
    grouped, outputs = query.shape[1] != key.shape[1], []
    for start, places, q, k, v in zip(starts, *parts, strict=True):
        for some, q_some in zip((places - start).split(ROWS_AT_ONCE), q.split(ROWS_AT_ONCE, 2), strict=True):
            if len(some):
                stop = int(some[-1]) + 1
                seen = some[:, None] >= torch.arange(stop, device=some.device)
                read = q_some, k[:, :, :stop], v[:, :, :stop]
                outputs.append(F.scaled_dot_product_attention(*read, seen, scale=scaling, enable_gqa=grouped))
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def _run(count: int, length: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool) -> Tensor:
    """`count` documents of `length` tokens as one batch: [H,count*length,D] -> [count*length,H,D]."""
    q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _varlen(query: Tensor, key: Tensor, value: Tensor, scaling: float, packing: Packing) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu, longest = packing.cu_seqlens, packing.max_length
    return _of_documents(q, k, v, cu, cu, longest, longest, scaling, packing.causal)


def of_chunks(query: Tensor, key: Tensor, value: Tensor, scaling: float, chunks: Sequence[PackedChunk]) -> Tensor:
    """Causal attention of the chunks' queries [1,Hq,L,D] over the keys and values of all tokens [1,Hkv,T,D]: [L,Hq,D].

    One call for each chunk. A document's last query of a chunk reads its last key there: masks end at the lower right.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for part, q_part in zip(chunks, q.split([len(range(c.chunk.start, c.chunk.stop)) for c in chunks]), strict=True):
        read = slice(part.chunk.first_key, part.chunk.stop)
        longest = max(part.chunk.queries), max(part.chunk.keys)
        borders = part.cu_queries, part.cu_keys
        outputs.append(_of_documents(q_part, k[read], v[read], *borders, *longest, scaling, True))
    return torch.cat(outputs)


def _of_documents(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scaling: float, causal: bool
) -> Tensor:
    """One call of torch's attention of variable length."""
    from torch.nn.attention.varlen import varlen_attn

    window, grouped = (-1, 0) if causal else (-1, -1), q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scaling, window_size=window, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out
