"""Attention over packed documents, without a T x T mask; learner/model/adapt.py registers it with transformers.

Shape suffixes: T = packed tokens, H = heads, D = head size; documents lie one after another along T.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cpu import packed_attention as cpu_attention
from learner.batch.packing import PackedChunk, Packing, Rows
from learner.batch.shared_prefixes import with_prefixes
from learner.model.context_collectives import whole_keys_values

_varlen_allowed = True  # a state of the process, like torch's own choice of kernels


def use_varlen(allowed: bool) -> None:
    """Set whether half precision on a GPU uses torch's variable-length attention; see
    learner/model/attention_backend."""
    global _varlen_allowed
    _varlen_allowed = allowed


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing,
    only_asked: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention within each document: query [1,Hq,T,D], key and value [1,Hkv,T,D] -> [1,T,Hq,D].

    With `only_asked` there are queries only at the packing's `asked` rows: [1,Hq,N,D] -> [1,N,Hq,D]. If the packing has
    a shard, T are this rank's tokens, and the call is a collective of the ranks that share the microbatch. If it has
    prefixes, T are the tokens that are computed.
    """
    fast = _varlen_allowed and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if packing.shard is not None:
        key, value = whole_keys_values(key, value, packing.shard)
        if fast and not only_asked:
            return of_chunks(query, key, value, scaling, packing.chunks)[None], None
    if packing.prefixes is not None:
        key, value = (with_prefixes(x, packing.prefixes) for x in (key, value))
        if fast and not only_asked:
            return _varlen(query, key, value, scaling, packing)[None], None
    rows = packing.asked if only_asked else packing.own
    if rows is None and packing.windows is not None and getattr(module, "looks_through_windows", False):
        packing = packing.windows
    if cpu_attention.supports_layer(query, query.shape[1], key.shape[1], query.shape[3]):
        documents = cpu_attention.whole_documents(packing.runs, packing.causal) if rows is None else documents_of(rows)
        return cpu_attention.attend(*_alone(query, key, value), documents, scaling)[None], None
    if rows is not None:
        return of_rows(query, key, value, rows, scaling)[None], None
    if fast:
        return _varlen(query, key, value, scaling, packing)[None], None
    sizes = [count * length for count, length in packing.runs]
    parts = zip(packing.runs, *(x.split(sizes, dim=1) for x in _alone(query, key, value)), strict=True)
    outputs = [_run(count, length, q, k, v, scaling, packing.causal) for (count, length), q, k, v in parts]
    return torch.cat(outputs)[None], None


def _alone(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Remove the first dimension, of size 1."""
    # squeeze, not x[0]: the gradient of a squeezed view is a view too, that of x[0] a copy into a tensor of zeros.
    return query.squeeze(0), key.squeeze(0), value.squeeze(0)


def documents_of(rows: Rows) -> cpu_attention.Documents:
    """Return the pieces of `rows`, with those of each document joined."""
    borders: list[list[int]] = []
    at = 0
    for count, start, _ in rows.pieces:
        if borders and borders[-1][2] == start:
            borders[-1][1] += count
        else:
            borders.append([at, count, start])
        at += count
    packed = torch.tensor(borders, dtype=torch.int64).reshape(-1, 3)
    return cpu_attention.Documents(packed, rows.positions - packed[:, 2].repeat_interleave(packed[:, 1]) + 1)


def of_rows(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float) -> Tensor:
    """Compute causal attention of the queries of some rows [1,Hq,R,D] over the keys and values of all T, piece by
    piece: [R,Hq,D]."""
    counts = [count for count, _, _ in rows.pieces]
    grouped, outputs = query.shape[1] != key.shape[1], []
    parts = zip(rows.pieces, rows.positions.split(counts), query.split(counts, 2), strict=True)
    for (_, start, stop), positions, q in parts:
        seen = positions[:, None] >= torch.arange(start, stop, device=positions.device)
        read = q, key[:, :, start:stop], value[:, :, start:stop]
        outputs.append(F.scaled_dot_product_attention(*read, seen, scale=scaling, enable_gqa=grouped))
    return torch.cat(outputs, 2).squeeze(0).transpose(0, 1)


def _run(count: int, length: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool) -> Tensor:
    """Compute `count` documents of `length` tokens as one batch: [H,count*length,D] -> [count*length,H,D]."""
    q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _varlen(query: Tensor, key: Tensor, value: Tensor, scaling: float, packing: Packing) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in _alone(query, key, value))
    cu_keys, most_keys, prefixes = packing.cu_seqlens, packing.max_length, packing.prefixes
    cu_queries, most = (cu_keys, most_keys) if prefixes is None else (prefixes.cu_queries, prefixes.most_queries)
    return _of_documents(q, k, v, cu_queries, cu_keys, most, most_keys, scaling, packing.causal)


def of_chunks(query: Tensor, key: Tensor, value: Tensor, scaling: float, chunks: Sequence[PackedChunk]) -> Tensor:
    """Compute causal attention of the chunks' queries [1,Hq,L,D] over the keys and values of all tokens [1,Hkv,T,D]:
    [L,Hq,D].

    There is one call for each chunk. The last query that a document has in a chunk reads the last of the document's
    keys there: causal masks are aligned at the lower right.
    """
    q, k, v = (x.transpose(0, 1) for x in _alone(query, key, value))
    outputs = []
    for part, q_part in zip(chunks, q.split([len(range(c.chunk.start, c.chunk.stop)) for c in chunks]), strict=True):
        read = slice(part.chunk.first_key, part.chunk.stop)
        longest = max(part.chunk.queries), max(part.chunk.keys)
        borders = part.cu_queries, part.cu_keys
        outputs.append(_of_documents(q_part, k[read], v[read], *borders, *longest, scaling, True))
    return torch.cat(outputs)


@functools.cache
def _takes_enable_gqa() -> bool:
    """Tell whether torch's variable-length attention has an argument for heads that share keys. In torch 2.11 it has
    none, but its kernel supports them."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _of_documents(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scaling: float, causal: bool
) -> Tensor:
    """Compute the attention by one call of torch's variable-length attention."""
    from torch.nn.attention.varlen import varlen_attn

    # Without a window torch takes cuDNN for full attention, which builds a plan for each new shape and keeps it.
    window = (-1, 0) if causal else (max_k, max_k)
    grouped: Any = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_enable_gqa() else {}
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scaling, window_size=window, **grouped)
    assert isinstance(out, Tensor)
    return out


@torch.no_grad()
def check_masks(device: torch.device) -> None:
    """Raise ValueError unless torch's variable-length attention aligns its causal masks at the lower right.

    Then a document's last query reads its last key. Ranks that share a microbatch and shared prefixes need that.
    """
    draw, queries, keys = torch.Generator().manual_seed(0), (3, 2), (7, 2)
    q, k, v = (torch.randn(sum(counts), 2, 64, generator=draw) for counts in (queries, keys, keys))
    half = [x.to(device, torch.bfloat16) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor((0, *accumulate(n)), dtype=torch.int32, device=device) for n in (queries, keys))
    got = _of_documents(half[0], half[1], half[2], cu_q, cu_k, max(queries), max(keys), 64**-0.5, True).float().cpu()
    parts = zip(got.split(queries), q.split(queries), k.split(keys), v.split(keys), strict=True)
    for found, *document in parts:
        asked, read, values = (x.transpose(0, 1) for x in document)
        seen = torch.ones(asked.shape[1], read.shape[1], dtype=torch.bool).tril(read.shape[1] - asked.shape[1])
        expected = F.scaled_dot_product_attention(asked, read, values, seen, scale=64**-0.5)
        off = float((found - expected.transpose(0, 1)).abs().max())
        if not off < 0.1:
            raise ValueError(
                f"torch's attention of variable length is off by {off:.2g} where documents have fewer queries than "
                "keys; set learner.parallel.attention = 'sdpa'"
            )
