"""The division of a packed stream of T tokens among the C ranks of a context group, as pure functions.

The stream is cut into 2C chunks of equal length, and rank r holds chunks r and 2C-1-r (Grattafiori et al., 2024, "The
Llama 3 herd of models", section 3.3.2). In causal attention late tokens read more keys. With an early and a late chunk
each, all ranks have equal work for a long document.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring tokens of a stream: queries `start` to `stop`, which read keys `first_key` to `stop`.

    `queries` and `keys`: their numbers for each document that has queries here. A document's last query here reads its
    last key here.
    """

    start: int
    stop: int
    first_key: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs in causal attention."""
        return sum(n * k - n * (n - 1) // 2 for n, k in zip(self.queries, self.keys, strict=True))


def least_tokens(size: int) -> int:
    """Return the length of the shortest stream in which no chunk is empty."""
    return 2 * size


def spans(length: int, size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (start, stop) of both chunks of a rank. The lengths of chunks differ by at most one token."""
    bounds = [i * length // (2 * size) for i in range(2 * size + 1)]
    last = 2 * size - 1 - rank
    return (bounds[rank], bounds[rank + 1]), (bounds[last], bounds[last + 1])


def token_positions(length: int, size: int, rank: int) -> np.ndarray:
    """Return int64 [L], ascending: the positions of a rank's tokens among the T. L differs by at most 2 between
    ranks."""
    return np.concatenate([np.arange(start, stop) for start, stop in spans(length, size, rank)])


def chunk(lengths: Sequence[int], start: int, stop: int) -> Chunk:
    """Return the chunk from `start` to `stop` of a stream of documents with these lengths."""
    queries, keys, first_key = [], [], stop
    for begin, end in zip((0, *accumulate(lengths)), accumulate(lengths), strict=False):
        if begin < stop and start < end:
            first_key = min(first_key, begin)
            queries.append(min(end, stop) - max(begin, start))
            keys.append(min(end, stop) - begin)
    return Chunk(start, stop, first_key, tuple(queries), tuple(keys))


def gathered_rows(counts: Sequence[int], of_ranks: Sequence[np.ndarray]) -> np.ndarray:
    """Return each item's row after a gathering that pads every rank's part to the longest: int64 [all].

    `of_ranks`: the items that each rank holds, in its order; `counts`: their numbers. Together they are all items.
    """
    longest = max(counts)
    rows = np.empty(sum(counts), dtype=np.int64)
    for rank, (count, items) in enumerate(zip(counts, of_ranks, strict=True)):
        rows[items] = rank * longest + np.arange(count)
    return rows


def deal(costs: Sequence[float], size: int) -> list[int]:
    """Return a rank for each item: the costliest first, each to the rank with the least cost so far (Graham, 1969)."""
    owners = [0] * len(costs)
    heap = [(0.0, rank) for rank in range(size)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, owners[item] = heap[0]
        heapq.heapreplace(heap, (cost + costs[item], owners[item]))
    return owners
