"""The borders of packed documents. The host knows them before any computation, so that it never waits for a device.

Shape suffixes: T = packed tokens, R = some of their positions; documents lie one after another along T.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.delta_rule import ScanPlan, plan_scan
from learner.batch.context_shard import ContextShard
from learner.batch.shared_prefixes import Prefixes, pieces_of
from learner.batch.zigzag import Chunk

ROWS_AT_ONCE = 128  # queries that share one mask


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The borders of packed documents. `runs`: (number of documents, length) of neighbours with equal length.

    `windows`: the finer packing for vision blocks that attend only within windows, for towers with such blocks. With a
    `shard`, queries, keys and values are only those of its tokens, in `chunks`; with `prefixes`, only those of the
    tokens that are computed.
    """

    runs: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor  # int32 [documents+1]
    max_length: int
    causal: bool
    windows: Packing | None = None
    shard: ContextShard | None = None
    chunks: tuple[PackedChunk, ...] = ()
    prefixes: Prefixes | None = None
    own: Rows | None = None  # the shard's tokens, or the tokens that are computed
    scan: ScanPlan | None = None  # the order of a recurrence over the documents, if the model has one
    asked: Rows | None = None  # the tokens that predict something, in order; with a shard only its own


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunk:
    """A chunk of a shard, with the borders of its documents' queries and keys."""

    chunk: Chunk
    cu_queries: Tensor  # int32 [documents+1], relative to the chunk's start
    cu_keys: Tensor  # int32 [documents+1], relative to the chunk's first key


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some ascending positions among the T, divided into pieces that each belong to one document."""

    positions: Tensor  # int64 [R]
    # For each piece: number of positions, first position of its document, the position after the piece's last one.
    pieces: tuple[tuple[int, int, int], ...]


def packing_of(
    lengths: tuple[int, ...],
    *,
    causal: bool,
    shard: ContextShard | None = None,
    own: np.ndarray | None = None,
    asked: np.ndarray | None = None,
    prefixes: Prefixes | None = None,
    recurrent: bool = False,
) -> Packing:
    """Return the packing of documents with these lengths, on the host.

    `lengths` are those of the whole microbatch, even with a `shard`; `own` and `asked` are int64 [R]. `recurrent`: plan
    a recurrence too, which no shard can have.
    """
    runs = tuple((len(list(group)), length) for length, group in groupby(lengths))
    parts = [] if shard is None else shard.chunks
    return Packing(
        runs,
        _borders(lengths),
        max(lengths),
        causal,
        shard=shard,
        chunks=tuple(PackedChunk(part, _borders(part.queries), _borders(part.keys)) for part in parts),
        prefixes=prefixes,
        scan=plan_scan(pieces_of(lengths, prefixes)) if recurrent else None,
        own=None if own is None else rows_of(own, lengths),
        asked=None if asked is None else rows_of(asked, lengths),
    )


def _borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)


def rows_of(positions: np.ndarray, lengths: tuple[int, ...]) -> Rows:
    """Return the rows of some positions. `positions`: int64 [R], ascending; `lengths`: of all documents."""
    bounds = np.cumsum([0, *lengths])
    pieces = []
    for start, (first, stop) in zip(
        bounds.tolist(), pairwise(np.searchsorted(positions, bounds).tolist()), strict=False
    ):
        for at in range(first, stop, ROWS_AT_ONCE):
            last = min(at + ROWS_AT_ONCE, stop)
            pieces.append((last - at, start, int(positions[last - 1]) + 1))
    return Rows(torch.from_numpy(np.ascontiguousarray(positions)), tuple(pieces))
