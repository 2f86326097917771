"""The assignment of episodes to microbatches and ranks.

Every microbatch costs one gathering of the parameters, and ranks wait for each other in each. So there are few
microbatches, and those that run at the same time have about equal costs. None has more than `budget` tokens, unless it
is a single longer episode.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

Bins = list[list[int]]  # indices of episodes
Item = TypeVar("Item")
MOST_EXTRA = 1 / 8  # largest accepted share of additional microbatches for encoding each image once
PROBE_SHARE = 4


def assign_microbatches(
    lengths: Sequence[int], num_ranks: int, budget: int, costs: Sequence[float] | None = None
) -> list[Bins]:
    """Return bins[rank][microbatch] = indices of `lengths`. All ranks get equally many microbatches; some may be empty.

    Their number is at most 3/2 of the minimum, the bound of best-fit decreasing (Simchi-Levi, 1994), rounded up to a
    multiple of the ranks. `costs`: of each episode, in any unit; None: its tokens. Costs are balanced as far as the
    budget allows.
    """
    sizes = [min(length, budget) for length in lengths]  # a longer episode gets a microbatch of its own
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


def assign_neighbours(
    lengths: Sequence[int], num_ranks: int, budget: int, costs: Sequence[float] | None = None
) -> list[Bins]:
    """Return bins as `assign_microbatches` does, for episodes whose neighbours share images (those of a group).

    Each microbatch is a run of neighbours, so that an image is encoded only once, except in groups that span two
    microbatches. If this takes more than `MOST_EXTRA` more microbatches, the bins are those of `assign_microbatches`.
    With `costs`, microbatches of about equal costs run at the same time.
    """
    sizes = [min(length, budget) for length in lengths]
    per_rank = _per_rank(_stretches(sizes, budget), num_ranks)
    if per_rank > (1 + MOST_EXTRA) * _per_rank(_best_fit(sizes, budget), num_ranks):
        return assign_microbatches(lengths, num_ranks, budget, costs)
    count = per_rank * num_ranks
    bins = _even_stretches(sizes if costs is None else costs, count)
    if not _fits(bins, sizes, budget):
        bins = _smallest(partial(_stretches, sizes), sizes, count, budget)
    bins += [[] for _ in range(count - len(bins))]
    if costs is None:
        return [bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)]
    bins.sort(key=lambda chosen: -sum(costs[i] for i in chosen))
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def probe_of(microbatches: Sequence[list[Item]]) -> list[Item]:
    """Return a quarter of a rank's last microbatch, on which the policy's change is measured; empty if there is
    none."""
    last = microbatches[-1] if microbatches else []
    return last[: -(-len(last) // PROBE_SHARE)]


def _per_rank(bins: Bins, num_ranks: int) -> int:
    return max(1, -(-len(bins) // num_ranks))


def _fits(bins: Bins, sizes: Sequence[int], budget: int) -> bool:
    return all(sum(sizes[i] for i in chosen) <= budget for chosen in bins)


def _costliest_first(sizes: Sequence[int], costs: Sequence[float], count: int, budget: int) -> Bins | None:
    """Put each item, costliest first, into the cheapest bin with enough room; return None if there is none for some
    item."""
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
    """Return runs of neighbours whose costs differ by at most about one episode's, regardless of the budget."""
    bins: Bins = [[] for _ in range(count)]
    total = float(sum(costs)) or 1.0
    middles = np.cumsum(costs) - np.asarray(costs) / 2
    for i, b in enumerate((middles * count / total).astype(int).clip(max=count - 1).tolist()):
        bins[b].append(i)
    return bins


def _smallest(bins_of: Callable[[int], Bins], sizes: Sequence[int], count: int, budget: int) -> Bins:
    """Return `bins_of` the smallest capacity found by bisection that needs at most `count` bins, as the budget does.

    With best-fit this is MULTIFIT (Coffman et al., 1978).
    """
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
    """Put each item, longest first, into the fullest bin with enough room."""
    bins: Bins = []
    room: list[tuple[int, int]] = []  # sorted: (free room, bin)
    for i in _decreasing(sizes):
        fullest = bisect_left(room, (sizes[i], -1))
        free, b = room.pop(fullest) if fullest < len(room) else (capacity, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        insort(room, (free - sizes[i], b))
    return bins


def _stretches(sizes: Sequence[int], capacity: int) -> Bins:
    """Return runs of neighbours, each as long as the capacity allows, which gives the fewest runs."""
    bins: Bins = []
    filled = capacity
    for i, size in enumerate(sizes):
        if filled + size > capacity:
            bins.append([])
            filled = 0
        bins[-1].append(i)
        filled += size
    return bins
