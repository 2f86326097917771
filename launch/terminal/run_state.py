"""The state of a running run: its last steps, evaluations and alarms."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from shared.config.recipe import Recipe
from shared.run_status import TRAINING, RunStatus

WINDOW = 10  # steps over which numbers are averaged
KEPT = 2000  # values kept for the curve of success
STEPS_BEFORE_ESTIMATE = 3


OF_A_TASK = re.compile(r"tasks/([^/]+)/reward")
OF_A_SET = re.compile(r"eval/sets/([^/]+)/success")


def names_in(row: Mapping[str, Any], pattern: re.Pattern[str]) -> list[str]:
    return [match[1] for key in row if (match := pattern.fullmatch(key))]


class RunState:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.started = recipe, time.monotonic()
        self.rows: deque[dict[str, float]] = deque(maxlen=WINDOW)  # metrics of the last steps
        self.success: deque[float] = deque(maxlen=KEPT)
        self.evaluation = ""  # the last one, in words
        self.sets: dict[str, float] = {}  # success of each of several held-out sets in it
        self.alarms: dict[str, Mapping[str, Any]] = {}  # active alarms, by rule
        self.step_at = self.started  # when the last step was seen
        self.status: RunStatus | None = None

    def add_row(self, row: dict[str, float]) -> bool:
        """Add a line of metrics.jsonl; return True if it is a step's."""
        if (value := row.get("eval/success")) is not None:
            self.evaluation = f"{value:.3f} (at step {row['step']})"
            self.sets = {name: row[f"eval/sets/{name}/success"] for name in names_in(row, OF_A_SET)}
        if "rollout/reward" not in row:
            return False
        self.rows.append(row)
        self.success.append(float(row.get("rollout/success") or 0.0))
        self.step_at = time.monotonic()
        return True

    def add_alarm(self, alarm: Mapping[str, Any]) -> None:
        """Add a line of alarms.jsonl."""
        self.alarms.pop(str(alarm.get("rule")), None)
        if alarm.get("level") != "cleared":
            self.alarms[str(alarm.get("rule"))] = alarm

    def mean(self, key: str) -> float:
        """Return the mean over the last ten steps."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return sum(values) / max(1, len(values))

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, if there are several, that the last ten steps have episodes of."""
        return list(dict.fromkeys(name for row in self.rows for name in names_in(row, OF_A_TASK)))

    def last(self, key: str) -> float | None:
        return self.rows[-1].get(key) if self.rows else None

    @property
    def staleness_max(self) -> float:
        return max((row.get("staleness/token/max") or 0 for row in self.rows), default=0.0)

    @property
    def phase(self) -> str:
        """Return what the learner does now, in words; "" while it trains, or if it is not known."""
        return "" if self.status is None or self.status.phase == TRAINING else self.status.in_words()

    @property
    def minutes_left(self) -> float | None:
        """The minutes that the remaining steps need at the median of the last ones; None before the third step. An
        evaluation between two steps counts as part of one of them, so that a mean would be far too long."""
        learner = self.recipe.learner
        if len(self.rows) < STEPS_BEFORE_ESTIMATE:
            return None
        step_s = median(row["time/step_s"] for row in self.rows)
        left = (learner.total_steps - int(self.rows[-1]["step"])) * step_s / 60
        if learner.max_minutes:
            left = min(left, learner.max_minutes - (self.last("progress/minutes") or 0))
        return max(0.0, left)

    @property
    def time_words(self) -> str:
        """The minutes since the start, and those that are left."""
        left = self.minutes_left
        return f"{self.last('progress/minutes') or 0:.1f} min" + ("" if left is None else f", {left:.1f} left")

    def line(self) -> str:
        """Return the state in one line, with means over the last ten steps."""
        row, mean = self.rows[-1], self.mean
        alarms = f"  alarms: {', '.join(self.alarms)}" if self.alarms else ""
        return (
            f"step {row['step']}/{self.recipe.learner.total_steps}  success {mean('rollout/success'):.2f}  "
            f"reward {mean('rollout/reward'):.2f}  "
            f"version {row['policy_version']:.0f}  staleness {mean('staleness/token/mean'):.1f} "
            f"(max {self.staleness_max:.0f})  "
            f"{mean('speed/turns_per_s'):.0f} turns/s  learner idle {100 * mean('learner/idle_frac'):.0f} %  "
            f"actor idle {100 * mean('actors/idle_frac'):.0f} %  {self.time_words}{alarms}"
        )
