"""Gathering metrics over a step and averaging them. The learner's writer is `learner.metrics.metric_writer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from shared.types import CUT_OFF, TRAINABLE_ENDINGS, Trajectory

MAX_NAMES = 512  # metrics of a run's episodes; further names are left out


class Distribution:
    """Values since the last `drain`: their mean, 95th percentile and maximum. Holds at most `capacity` values."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        self._room = self._capacity = capacity
        self._parts: list[np.ndarray] = []

    def add(self, values: float | Iterable[float] | np.ndarray) -> None:
        """Add values, as far as there is room."""
        self._parts.append(np.atleast_1d(np.asarray(values, np.float64))[: self._room])
        self._room -= len(self._parts[-1])

    def drain(self, name: str) -> dict[str, float]:
        """Return `NAME/mean`, `NAME/p95` and `NAME/max` of the values, and forget them; nothing if there are none."""
        values = np.concatenate([np.empty(0), *self._parts])
        self._room, self._parts = self._capacity, []
        if not values.size:
            return {}
        summary = {"mean": values.mean(), "p95": np.percentile(values, 95), "max": values.max()}
        return {f"{name}/{kind}": float(value) for kind, value in summary.items()}


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return, for each key that occurs in `rows`, the mean over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(float(value))
    return {key: _sum(values) / len(values) for key, values in columns.items()}


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:  # finite values whose sum is too large
        return math.copysign(math.inf, max(values, key=abs))


class ReportedMetrics:
    """What the episodes of a run, or of an evaluation, have reported so far; from it follows what an episode counts as
    that was cut off before it could report.

    `success` is the environment's metric of that name. An episode without it counts 0 if any other has it; only if none
    has it, a positive reward is a success. A metric all of whose values are from 0 to 1 is a share. An episode counts 0
    for every share that it lacks if it lacks `success` where others have it or, if none has it, if a token limit cut it
    off. So shares are means over the same episodes, but for those that say of themselves that a share does not apply:
    they report `success` and not that share. In a run of several tasks all this holds within each task: `of` gives its
    own.
    """

    def __init__(self) -> None:
        self.has_success = False
        self.left_out: set[str] = set()  # names beyond `MAX_NAMES`, some of them
        self._is_share: dict[str, bool] = {}  # by the metric's name
        self._of_tasks: dict[str, ReportedMetrics] = {}

    def of(self, task: str) -> ReportedMetrics:
        """Return what the episodes of a task have reported; "" is the only task of a run."""
        return self._of_tasks.setdefault(task, ReportedMetrics()) if task else self

    def include(self, episodes: Iterable[Trajectory]) -> None:
        """Take note of what these episodes report."""
        for t in episodes:
            self.has_success |= "success" in t.metrics
            for name, value in t.metrics.items():
                if name not in self._is_share and len(self._is_share) >= MAX_NAMES:
                    if len(self.left_out) < MAX_NAMES:
                        self.left_out.add(name)
                    continue
                self._is_share[name] = self._is_share.get(name, not name.endswith("_s")) and 0.0 <= value <= 1.0

    def success_of(self, t: Trajectory) -> float:
        """Return an episode's success."""
        return float(t.metrics.get("success", 0.0 if self.has_success else t.reward > 0))

    def metrics_of(self, t: Trajectory) -> dict[str, float]:
        """Return an episode's metrics as they count; those of a failed episode as they are."""
        values = {name: float(value) for name, value in t.metrics.items() if name in self._is_share}
        if t.ending not in TRAINABLE_ENDINGS:
            return values
        is_silent = "success" not in t.metrics if self.has_success else t.ending in CUT_OFF
        missing = dict.fromkeys((name for name, is_share in self._is_share.items() if is_share), 0.0)
        return (missing if is_silent else {}) | values | {"success": self.success_of(t)}
