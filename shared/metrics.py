"""Metrics as pure records: values gathered over a step, and their means. The learner's writer is
`learner.metrics.writer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np


class Distribution:
    """Values since the last `drain`: their mean, 95th percentile and maximum. Holds at most `capacity` values."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        self._room = self._capacity = capacity
        self._parts: list[np.ndarray] = []

    def add(self, values: float | Iterable[float] | np.ndarray) -> None:
        self._parts.append(np.atleast_1d(np.asarray(values, np.float64))[: self._room])
        self._room -= len(self._parts[-1])

    def drain(self, name: str) -> dict[str, float]:
        """`NAME/mean`, `NAME/p95` and `NAME/max` of the values, which are forgotten; nothing if there are none."""
        values = np.concatenate([np.empty(0), *self._parts])
        self._room, self._parts = self._capacity, []
        if not values.size:
            return {}
        summary = {"mean": values.mean(), "p95": np.percentile(values, 95), "max": values.max()}
        return {f"{name}/{kind}": float(value) for kind, value in summary.items()}


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """For each key that occurs in `rows`, the mean over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(float(value))
    return {key: _sum(values) / len(values) for key, values in columns.items()}


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:  # of finite values
        return math.copysign(math.inf, max(values, key=abs))
