"""Reads a run's `metrics.jsonl` as columns over steps, minutes or episodes; also for live and crashed runs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

AXES = {"steps": "optimizer steps", "minutes": "minutes of training", "episodes": "episodes trained on"}
_PROGRESS = {"minutes": "progress/minutes", "episodes": "progress/episodes"}
_OF_A_STEP = "rollout/reward"  # rows of steps have this metric, rows of evaluations do not
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Points:
    """The points of a curve: `x` and `y`, float64 [n]; `y` is finite."""

    x: np.ndarray
    y: np.ndarray


@dataclass(slots=True)
class RunCurves:
    """One run's rows. Steps that were repeated after a restart occur once; minutes and episodes count on over
    restarts."""

    name: str
    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    _progress: dict[str, list[float]] = field(default_factory=lambda: {axis: [] for axis in _PROGRESS})
    _offsets: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PROGRESS, 0.0))

    def add(self, row: Row) -> None:
        if _OF_A_STEP not in row:
            self.evaluations.append(row)
            return
        for axis, key in _PROGRESS.items():
            column, value = self._progress[axis], float(row.get(key) or 0.0)
            if column and value + self._offsets[axis] < column[-1]:  # a restarted process counts from 0 again
                self._offsets[axis] = column[-1]
            column.append(value + self._offsets[axis])
        while self.steps and self.steps[-1]["step"] >= row["step"]:
            self.steps.pop()
            for column in self._progress.values():
                del column[-2]
        self.steps.append(row)

    @property
    def metrics(self) -> set[str]:
        return {name for row in [*self.steps, *self.evaluations] for name in row} - {"step", "time"}

    def series(self, metric: str, axis: str) -> Points:
        """Return a metric's values by step or by evaluation, over an axis of AXES."""
        steps = np.array([row["step"] for row in self.steps], np.float64)
        progress = steps if axis == "steps" else np.array(self._progress[axis])
        rows = self.evaluations if metric.startswith(("eval/", "eval_greedy/")) else self.steps
        pairs = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
        at, values = np.array(pairs, np.float64).reshape(-1, 2).T
        return Points(np.interp(at, [0.0, *steps], [0.0, *progress]), values)  # 0: an evaluation before the first step


def read_run(folder: Path | str) -> RunCurves:
    """Read a run's metrics. Raise ValueError, in one line, if the folder has no metrics of any step."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give a run's folder, such as runs/sokoban_tiny")
    run = RunCurves(Path(folder).resolve().name)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the line is cut off, or still being written
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            run.add(row)
    if not run.steps:
        raise ValueError(f"{path} has no step yet; let the run go on")
    return run


def check_metric(metric: str, runs: Iterable[RunCurves]) -> None:
    """Raise ValueError, which suggests a similar name, if no run has the metric."""
    known = set().union(*(run.metrics for run in runs))
    if metric not in known:
        near = difflib.get_close_matches(metric, sorted(known), 1, cutoff=0.0)
        raise ValueError(f"no run has a metric {metric!r}; did you mean {near[0]!r}?")


def smoothed(series: Points, window: int) -> Points:
    """Return the moving average over `window` values around each point, over fewer at the ends."""
    at = np.arange(len(series.y))
    low, high = np.maximum(at - (window - 1) // 2, 0), np.minimum(at + window // 2 + 1, len(at))
    sums = np.concatenate([[0.0], series.y.cumsum()])
    return Points(series.x, (sums[high] - sums[low]) / (high - low))


def spread(series: Sequence[Points], points: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Return several runs, interpolated on one grid over the range that all of them cover: x [points], y [runs,
    points]."""
    low, high = max(s.x[0] for s in series), min(s.x[-1] for s in series)
    grid = np.linspace(low, max(low, high), points)
    return grid, np.stack([np.interp(grid, s.x, s.y) for s in series])
