"""The order in which the tasks of a mixture take turns."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Interleave:
    """An endless order of tasks in which, at every place, each task has had its share of the places so far, to within a
    few places. What stands at a place follows from the weights alone, so that a restarted run goes on in it.

    Task i has its n-th turn at the time (2n + 1) / w_i, and turns are taken in the order of their times (Webster's
    method of sharing out seats). All of it is computed in whole numbers.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Take each task's weight, above 0; only their ratios count."""
        shares = [Fraction(repr(float(weight))) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        self._weights = [int(share * scale) for share in shares]
        self._sum = sum(self._weights)

    def counts(self, place: int) -> list[int]:
        """Return how many turns each task has had before a place."""
        # Up to the time t, task i has had floor((t w_i + 1) / 2) turns. From a time that is surely too early the last
        # few turns are taken one by one.
        time = max(0, 2 * (place - len(self._weights)))
        counts = [(time * weight + self._sum) // (2 * self._sum) for weight in self._weights]
        for _ in range(place - sum(counts)):
            counts[self._next(counts)] += 1
        return counts

    def turn(self, place: int) -> tuple[int, int]:
        """Return (task, which of its turns this is) at a place, both from 0."""
        counts = self.counts(place)
        task = self._next(counts)
        return task, counts[task]

    def _next(self, counts: Sequence[int]) -> int:
        return min(range(len(counts)), key=lambda i: (Fraction(2 * counts[i] + 1, self._weights[i]), i))
