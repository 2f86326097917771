"""The rules of rules.toml as records, and the limits that depend on a run's recipe."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from learner.alarms.metric_history import NUMBERS, Number, now

LIMITS = {  # the limits that a condition can name, described in words
    "gap": "0.001 in float32, 0.03 in bfloat16 (not judged where a step has several updates)",
    "canary_gap": "0.0001 in float32, 0.05 in bfloat16",
    "max_grad_norm": "`learner.optimizer.max_grad_norm`",
    "step_groups": "`learner.groups_per_step`",
    "equal_groups": "0.6 (not judged with groups of one)",
    "idle_engines": "0.7 (not judged where engines compute on a CPU, which they may share with the learner)",
}
_CONDITION = re.compile(r"(?:(\w+) of )?(\S+) ([<>]) (\S+)")


@dataclass(frozen=True, slots=True)
class Condition:
    metric: str
    number: Number  # computes the compared number from the metric's series
    above: bool  # true: the number must be above the limit; false: below
    limit: float | str  # a number, or a name in LIMITS

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition. Raise ValueError if the text is none."""
        match = _CONDITION.fullmatch(text)
        if match is None or (match[1] and match[1] not in NUMBERS):
            raise ValueError(f"learner/alarms/rules.toml: {text!r} is no condition")
        limit = match[4] if match[4] in LIMITS else float(match[4])
        return cls(match[2], NUMBERS[match[1]] if match[1] else now, match[3] == ">", limit)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    level: Literal["warning", "critical"]
    when: tuple[tuple[Condition, ...], ...]  # alternatives; the conditions of one must hold together
    holds: int  # consecutive steps
    message: str
    cause: str
    look_at: str
    cure: str
    endings: tuple[str, ...] = ()  # endings of the episodes that show the problem
    most_of: tuple[str, ...] = ()  # metrics of which the largest is told too
    lowest: bool = False  # the episodes with the lowest reward show the problem
    logged: bool = True

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.metric for conditions in self.when for c in conditions))


def read_rules() -> tuple[Rule, ...]:
    tables = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    rules = []
    for name, table in tables.items():
        when = tuple(tuple(map(Condition.parse, text.split(" and "))) for text in table.pop("when"))
        table |= {key: tuple(table.get(key, ())) for key in ("endings", "most_of")}
        rules.append(Rule(name, when=when, **table))
    return tuple(rules)


def limits_of(recipe: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of LIMITS for a recipe, given as in recipe.json; missing fields have their defaults."""
    learner = recipe.get("learner", {})
    objective, never = learner.get("objective", {}), float("inf")
    coarse = recipe.get("model", {}).get("dtype", "float32") != "float32"
    one_update = objective.get("passes", 1) * objective.get("minibatches", 1) == 1
    return {
        "gap": (0.03 if coarse else 0.001) if one_update else never,
        "canary_gap": 0.05 if coarse else 1e-4,
        "max_grad_norm": learner.get("optimizer", {}).get("max_grad_norm", 1.0),
        "step_groups": learner.get("groups_per_step", 64),
        "equal_groups": 0.6 if learner.get("group_size", 1) > 1 else never,
        "idle_engines": 0.7 if recipe.get("engine", {}).get("device", "cpu") == "cuda" else never,
    }


RULES = read_rules()
