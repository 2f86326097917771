"""A line of RUN/alarms.jsonl: a rule that was raised or cleared, with what a reader needs to act."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from learner.alarms.judge import Change
from learner.alarms.rules import Rule
from shared.types import Group

FILE = "alarms.jsonl"
MAX_EPISODES = 5


@dataclass(frozen=True, slots=True)
class Alarm:
    time: float
    step: int
    rule: str
    level: Literal["warning", "critical", "cleared"]
    message: str
    cause: str
    look_at: str
    cure: str
    values: dict[str, float | None]  # values of the rule's metrics; null: not a finite number
    episodes: list[str]  # some of the step's episodes that show the problem, as TICKET/INDEX

    @classmethod
    def of(cls, change: Change, groups: Sequence[Group] = (), at: float | None = None) -> Alarm:
        rule = change.rule
        return cls(
            time=round(time.time() if at is None else at, 3),
            step=change.step,
            rule=rule.name,
            level=rule.level if change.raised else "cleared",
            message=rule.message,
            cause=rule.cause,
            look_at=rule.look_at,
            cure=rule.cure,
            values={name: value if math.isfinite(value) else None for name, value in change.values.items()},
            episodes=episodes_behind(rule, groups) if change.raised else [],
        )

    def line(self) -> str:
        """Return one line: the problem with its numbers, its possible cause, and what to do."""
        numbers = ", ".join(f"{name} {'not finite' if v is None else f'{v:.4g}'}" for name, v in self.values.items())
        if self.level == "cleared":
            return f"alarm {self.rule} is over at step {self.step} ({numbers})"
        return (
            f"{self.level} alarm {self.rule} at step {self.step}: {self.message} ({numbers}); {self.cause}; {self.cure}"
        )

    def markdown(self) -> str:
        rows = [
            ("cause", self.cause),
            ("look at", self.look_at),
            ("do", self.cure),
            ("episodes", ", ".join(self.episodes)),
        ]
        return "\n\n".join([self.line().split(" (")[0], *(f"**{name}**: {text}" for name, text in rows if text)])

    def encode(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def episodes_behind(rule: Rule, groups: Sequence[Group]) -> list[str]:
    """Return some of the step's episodes that show the problem, as TICKET/INDEX; none if no single episode shows it."""
    episodes = [(f"{group.ticket_id}/{index}", t) for group in groups for index, t in enumerate(group.trajectories)]
    names = [name for name, t in episodes if t.ending.value in rule.endings]
    if rule.lowest:
        names = [name for name, t in sorted(episodes, key=lambda each: each[1].reward) if t.trainable]
    return names[:MAX_EPISODES]
