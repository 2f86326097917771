"""The history of a run's metrics in bounded memory, and the numbers computed from it that rules use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

FIRST = 10  # the number of steps that are a metric's start
RECENT = 60  # steps that are remembered
# Shares and counts that a step reports only if they are not 0.
ZERO_IF_MISSING = ("rollout/ending/", "arrived/ending/", "tokens/lag_")


@dataclass(slots=True)
class Series:
    """One metric's first values and its latest ones; values that are not finite are NaN."""

    start: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, value: float) -> None:
        if len(self.start) < FIRST and not math.isnan(value):
            self.start.append(value)
        self.recent.append(value)


def value_of(row: Mapping[str, float | None], metric: str) -> float | None:
    """Return a step's value of a metric; None if the step does not report it, NaN if it is not finite."""
    if metric not in row:
        return 0.0 if metric.startswith(ZERO_IF_MISSING) else None
    value = row[metric]
    return float(value) if value is not None and math.isfinite(value) else math.nan


# ------------------------------------------------------------------ numbers made of a series; None: too short to tell


def now(series: Series) -> float | None:
    """Return the last value."""
    return series.recent[-1]


def mean_of_20(series: Series) -> float | None:
    """Return the mean of the last 20 steps."""
    return _mean(series, 20)


def share_of_start(series: Series) -> float | None:
    """Return the last value divided by the mean of the first ten steps."""
    if len(series.start) < FIRST or not fmean(series.start) > 0:
        return None
    return series.recent[-1] / fmean(series.start)


def gain(series: Series) -> float | None:
    """Return the mean of the last ten steps minus that of the first ten, in standard deviations of the first ten."""
    last = _mean(series, FIRST)
    if last is None or len(series.start) < FIRST:
        return None
    rise = last - fmean(series.start)
    spread = pstdev(series.start)
    return rise / spread if spread > 0 else math.copysign(math.inf, rise) if rise else 0.0


def times_median(series: Series) -> float | None:
    """Return the last value divided by the median of the up to 59 steps before it; None with fewer than ten."""
    before = [value for value in list(series.recent)[:-1] if not math.isnan(value)]
    if len(before) < FIRST or not median(before) > 0:
        return None
    return series.recent[-1] / median(before)


def share_of_best(series: Series) -> float | None:
    """Return the mean of the last ten steps divided by the best mean of ten consecutive steps among the last sixty;
    None if that is below 0.1."""
    values = list(series.recent)
    if len(values) < 3 * FIRST or any(math.isnan(value) for value in values):
        return None
    means = [fmean(values[end - FIRST : end]) for end in range(FIRST, len(values) + 1)]
    return means[-1] / max(means) if max(means) >= 0.1 else None


def _mean(series: Series, count: int) -> float | None:
    last = list(series.recent)[-count:]
    return fmean(last) if len(last) == count else None


Number = Callable[[Series], float | None]
NUMBERS: dict[str, Number] = {
    number.__name__: number for number in (mean_of_20, share_of_start, gain, times_median, share_of_best)
}
