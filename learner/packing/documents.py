"""Where packed documents begin and end, known to the host before anything is computed, so that no device is waited for.

Shape suffixes: T = packed tokens, R = some of their places; documents lie one after another along T.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from learner.packing.prefixes import Prefixes
from learner.parallel.layout import Chunk
from learner.parallel.share import Share
from shared.vision import Grid

ROWS_AT_ONCE = 128  # queries that share one mask


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where documents begin and end. `runs`: neighbours of equal length as (how many, length).

    `windows` is the finer packing of vision blocks that only look inside a window, for towers that have such blocks.
    With a `share`, queries, keys and values are those of its tokens alone, in `chunks`; with `prefixes`, those of the
    tokens that are computed.
    """

    runs: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor  # int32 [documents+1]
    max_length: int
    causal: bool
    windows: Packing | None = None
    share: Share | None = None
    chunks: tuple[PackedChunk, ...] = ()
    prefixes: Prefixes | None = None
    own: Rows | None = None  # of a share's tokens, or of those that are computed
    asked: Rows | None = None  # of the tokens that predict something, in their order; of a share those of its own


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunk:
    """A chunk of a share, with where its documents' queries and keys begin and end."""

    chunk: Chunk
    cu_queries: Tensor  # int32 [documents+1], from the chunk's start
    cu_keys: Tensor  # int32 [documents+1], from its first key


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some places among the T, ascending, in pieces of one document."""

    places: Tensor  # int64 [R]
    pieces: tuple[tuple[int, int, int], ...]  # how many, their document's first place, the place after their last


def packing_of(
    lengths: tuple[int, ...],
    *,
    causal: bool,
    share: Share | None = None,
    own: np.ndarray | None = None,
    asked: np.ndarray | None = None,
    prefixes: Prefixes | None = None,
) -> Packing:
    """On the host. `lengths` are those of the whole microbatch, with a `share` too; `own` and `asked` int64 [R]."""
    runs = tuple((len(list(group)), length) for length, group in groupby(lengths))
    parts = [] if share is None else share.chunks
    return Packing(
        runs,
        _borders(lengths),
        max(lengths),
        causal,
        share=share,
        chunks=tuple(PackedChunk(part, _borders(part.queries), _borders(part.keys)) for part in parts),
        prefixes=prefixes,
        own=None if own is None else rows_of(own, lengths),
        asked=None if asked is None else rows_of(asked, lengths),
    )


def _borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)


def rows_of(places: np.ndarray, lengths: tuple[int, ...]) -> Rows:
    """`places`: int64 [R], ascending; `lengths`: of all documents."""
    bounds = np.cumsum([0, *lengths])
    pieces = []
    for start, (first, stop) in zip(bounds.tolist(), pairwise(np.searchsorted(places, bounds).tolist()), strict=False):
        for at in range(first, stop, ROWS_AT_ONCE):
            last = min(at + ROWS_AT_ONCE, stop)
            pieces.append((last - at, start, int(places[last - 1]) + 1))
    return Rows(torch.from_numpy(np.ascontiguousarray(places)), tuple(pieces))


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
