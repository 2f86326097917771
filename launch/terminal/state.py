"""What is known of a run that goes on: its last steps, evaluations and alarms."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from shared.config import Recipe

WINDOW = 10  # steps over which numbers are averaged
KEPT = 2000  # values of the success's curve


class RunState:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.started = recipe, time.monotonic()
        self.rows: deque[dict[str, float]] = deque(maxlen=WINDOW)  # of steps
        self.success: deque[float] = deque(maxlen=KEPT)
        self.evaluation = ""  # the last one, in words
        self.alarms: dict[str, Mapping[str, Any]] = {}  # raised now, by rule
        self.step_at = self.started  # when the last step was seen

    def add_row(self, row: dict[str, float]) -> bool:
        """A line of metrics.jsonl; whether it is of a step."""
        if (value := row.get("eval/success")) is not None:
            self.evaluation = f"{value:.3f} (at step {row['step']})"
        if "rollout/reward" not in row:
            return False
        self.rows.append(row)
        self.success.append(float(row.get("rollout/success") or 0.0))
        self.step_at = time.monotonic()
        return True

    def add_alarm(self, alarm: Mapping[str, Any]) -> None:
        """A line of alarms.jsonl."""
        self.alarms.pop(str(alarm.get("rule")), None)
        if alarm.get("level") != "cleared":
            self.alarms[str(alarm.get("rule"))] = alarm

    def mean(self, key: str) -> float:
        """Over the last ten steps."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return sum(values) / max(1, len(values))

    def last(self, key: str) -> float | None:
        return self.rows[-1].get(key) if self.rows else None

    @property
    def staleness_max(self) -> float:
        return max((row.get("staleness/token/max") or 0 for row in self.rows), default=0.0)

    @property
    def minutes_left(self) -> float:
        steps = int(self.rows[-1]["step"]) if self.rows else 0
        left, limit = (self.recipe.learner.total_steps - steps) * self.mean("time/step_s") / 60, self.recipe.learner
        return max(
            0.0, min(left, limit.max_minutes - (self.last("progress/minutes") or 0)) if limit.max_minutes else left
        )

    def line(self) -> str:
        """Means over the last ten steps."""
        row, mean = self.rows[-1], self.mean
        alarms = f"  alarms: {', '.join(self.alarms)}" if self.alarms else ""
        return (
            f"step {row['step']}/{self.recipe.learner.total_steps}  success {mean('rollout/success'):.2f}  "
            f"reward {mean('rollout/reward'):.2f}  "
            f"version {row['policy_version']:.0f}  staleness {mean('staleness/token/mean'):.1f} "
            f"(max {self.staleness_max:.0f})  "
            f"{mean('speed/turns_per_s'):.0f} turns/s  learner idle {100 * mean('learner/idle_frac'):.0f} %  "
            f"actor idle {100 * mean('actors/idle_frac'):.0f} %  {row['progress/minutes']:.1f} min, "
            f"{self.minutes_left:.1f} left{alarms}"
        )
