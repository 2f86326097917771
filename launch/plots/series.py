"""What a run's `metrics.jsonl` says, as columns over steps, minutes or episodes; live and crashed runs too."""

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
_OF_A_STEP = "rollout/reward"  # the rows of steps have it, those of evaluations do not
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """float64 [n] each; `y` is finite."""

    x: np.ndarray
    y: np.ndarray


@dataclass(slots=True)
class Run:
    """One run's rows. Steps that a restart made again stand there once; minutes and episodes go on over restarts."""

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
            if column and value + self._offsets[axis] < column[-1]:  # a process that has begun to count anew
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

    def series(self, metric: str, axis: str) -> Series:
        """A metric's values by step or by evaluation, over an axis of AXES."""
        steps = np.array([row["step"] for row in self.steps], np.float64)
        progress = steps if axis == "steps" else np.array(self._progress[axis])
        rows = self.evaluations if metric.startswith(("eval/", "eval_greedy/")) else self.steps
        found = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
        at, values = np.array(found, np.float64).reshape(-1, 2).T
        return Series(np.interp(at, [0.0, *steps], [0.0, *progress]), values)  # an evaluation before the first step too


def read_run(folder: Path | str) -> Run:
    """ValueError, in one line, where the folder holds no metrics of a step."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give a run's folder, such as runs/sokoban_tiny")
    run = Run(Path(folder).resolve().name)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a kill has cut it off, or it is being written
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            run.add(row)
    if not run.steps:
        raise ValueError(f"{path} has no step yet; let the run go on")
    return run


def check_metric(metric: str, runs: Iterable[Run]) -> None:
    """ValueError where no run has it, with a near name."""
    known = set().union(*(run.metrics for run in runs))
    if metric not in known:
        near = difflib.get_close_matches(metric, sorted(known), 1, cutoff=0.0)
        raise ValueError(f"no run has a metric {metric!r}; did you mean {near[0]!r}?")


def smoothed(series: Series, window: int) -> Series:
    """The mean of `window` values around each, of those that there are."""
    at = np.arange(len(series.y))
    low, high = np.maximum(at - (window - 1) // 2, 0), np.minimum(at + window // 2 + 1, len(at))
    sums = np.concatenate([[0.0], series.y.cumsum()])
    return Series(series.x, (sums[high] - sums[low]) / (high - low))


def spread(series: Sequence[Series], points: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Several runs on one grid, as far as all of them go: x [points], y [runs, points]."""
    low, high = max(s.x[0] for s in series), min(s.x[-1] for s in series)
    grid = np.linspace(low, max(low, high), points)
    return grid, np.stack([np.interp(grid, s.x, s.y) for s in series])
