"""Which episodes go into which microbatch of which rank.

Every microbatch costs a gathering of the parameters, and ranks wait for one another in each: there are few of them, and
those that run at the same time cost about as much. None holds more than `budget` tokens unless a single episode does.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

Bins = list[list[int]]  # indices of episodes
MOST_EXTRA = 1 / 8  # microbatches, as a share, for images that are encoded once


def plan(lengths: Sequence[int], num_ranks: int, budget: int, costs: Sequence[float] | None = None) -> list[Bins]:
    """plan[rank][microbatch] = indices of `lengths`. Every rank gets as many microbatches; some may be empty.

    There are at most 3/2 times as many as needed, the bound of best-fit decreasing (Simchi-Levi, 1994), then rounded up
    to the ranks. `costs`: of each episode, in any unit; None: its tokens. They are even where the budget allows.
    """
    sizes = [min(length, budget) for length in lengths]  # one that is longer takes a microbatch of its own
    costs = lengths if costs is None else costs
    per_rank = _per_rank(_best_fit(sizes, budget), num_ranks)
    bins = _costliest_first(sizes, costs, per_rank * num_ranks, budget)
    if bins is None:
        bins = _costliest_first(sizes, sizes, per_rank * num_ranks, budget)
    if bins is None:
        bins = _smallest(partial(_best_fit, sizes), sizes, per_rank * num_ranks, budget)
    bins += [[] for _ in range(per_rank * num_ranks - len(bins))]
    bins.sort(key=lambda chosen: -sum(costs[i] for i in chosen))
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def plan_together(
    lengths: Sequence[int], num_ranks: int, budget: int, costs: Sequence[float] | None = None
) -> list[Bins]:
    """As `plan`, for episodes whose neighbours share images (those of a group): each microbatch is a stretch of them,
    so that an image is encoded once, but for groups at the seams. Where that takes more than `MOST_EXTRA` more
    microbatches it is `plan`'s. With `costs`, microbatches of about equal ones run at the same time.
    """
    sizes = [min(length, budget) for length in lengths]
    per_rank = _per_rank(_stretches(sizes, budget), num_ranks)
    if per_rank > (1 + MOST_EXTRA) * _per_rank(_best_fit(sizes, budget), num_ranks):
        return plan(lengths, num_ranks, budget, costs)
    count = per_rank * num_ranks
    bins = _even_stretches(sizes if costs is None else costs, count)
    if not _fits(bins, sizes, budget):
        bins = _smallest(partial(_stretches, sizes), sizes, count, budget)
    bins += [[] for _ in range(count - len(bins))]
    if costs is None:
        return [bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)]
    bins.sort(key=lambda chosen: -sum(costs[i] for i in chosen))
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _per_rank(bins: Bins, num_ranks: int) -> int:
    return max(1, -(-len(bins) // num_ranks))


def _fits(bins: Bins, sizes: Sequence[int], budget: int) -> bool:
    return all(sum(sizes[i] for i in chosen) <= budget for chosen in bins)


def _costliest_first(sizes: Sequence[int], costs: Sequence[float], count: int, budget: int) -> Bins | None:
    """Each into the cheapest bin then that has room for it; None where none has."""
    bins: Bins = [[] for _ in range(count)]
    room = [budget] * count
    heap = [(0.0, b) for b in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        full = []
        while heap and room[heap[0][1]] < sizes[i]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heap[0]
        bins[b].append(i)
        room[b] -= sizes[i]
        heapq.heapreplace(heap, (cost + costs[i], b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _even_stretches(costs: Sequence[float], count: int) -> Bins:
    """Neighbours, in stretches that are even up to one episode, however large."""
    bins: Bins = [[] for _ in range(count)]
    total = float(sum(costs)) or 1.0
    middles = np.cumsum(costs) - np.asarray(costs) / 2
    for i, b in enumerate((middles * count / total).astype(int).clip(max=count - 1).tolist()):
        bins[b].append(i)
    return bins


def _smallest(bins_of: Callable[[int], Bins], sizes: Sequence[int], count: int, budget: int) -> Bins:
    """`bins_of` the smallest capacity that bisection finds to give at most `count` bins, as the budget does (with
    best-fit this is MULTIFIT: Coffman et al., 1978)."""
    best = bins_of(budget)
    low, high = max(sizes, default=budget), budget
    while low < high:
        middle = (low + high) // 2
        bins = bins_of(middle)
        if len(bins) <= count:
            best, high = bins, middle
        else:
            low = middle + 1
    return best


def _decreasing(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def _best_fit(sizes: Sequence[int], capacity: int) -> Bins:
    """Each, longest first, into the fullest bin that has room."""
    bins: Bins = []
    room: list[tuple[int, int]] = []  # sorted: (what is free, bin)
    for i in _decreasing(sizes):
        place = bisect_left(room, (sizes[i], -1))
        free, b = room.pop(place) if place < len(room) else (capacity, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        insort(room, (free - sizes[i], b))
    return bins


def _stretches(sizes: Sequence[int], capacity: int) -> Bins:
    """Neighbours, as many as there is room for; the fewest stretches that there can be."""
    bins: Bins = []
    held = capacity
    for i, size in enumerate(sizes):
        if held + size > capacity:
            bins.append([])
            held = 0
        bins[-1].append(i)
        held += size
    return bins
