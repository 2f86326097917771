"""Metrics as pure records: values gathered over a step, and their means. The learner's writer is
`learner.metrics.writer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np


class Distribution:
    """Values since the last `drain`: their mean, 95th percentile and maximum. Holds at most `capacity` values."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        self._capacity = capacity
        self._parts: list[np.ndarray] = []
        self._size = 0

    def add(self, values: float | Iterable[float] | np.ndarray) -> None:
        part = np.atleast_1d(np.asarray(values, np.float64)).ravel()[: self._capacity - self._size]
        self._parts.append(part)
        self._size += len(part)

    def drain(self, name: str) -> dict[str, float]:
        """The summary of the values, which are forgotten."""
        values = np.concatenate(self._parts) if self._size else np.empty(0)
        self._parts, self._size = [], 0
        return summary(name, values)


def summary(name: str, values: Iterable[float] | np.ndarray) -> dict[str, float]:
    """`NAME/mean`, `NAME/p95` and `NAME/max` of `values`; nothing if there are none."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64)
    if not array.size:
        return {}
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/p95": float(np.percentile(array, 95)),
        f"{name}/max": float(array.max()),
    }


def means(rows: Iterable[Mapping[str, float]], prefix: str = "") -> dict[str, float]:
    """For each key that occurs in `rows`, the mean over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(float(value))
    return {prefix + key: math.fsum(values) / len(values) for key, values in columns.items()}
