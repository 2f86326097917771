"""The rules of rules.toml as records, and the limits that depend on a run's recipe."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from learner.alarms.series import NUMBERS, Number, now

LIMITS = {  # of a condition: what it is, in words
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
    number: Number  # made of the metric's series
    above: bool  # the limit; else below
    limit: float | str  # a name of LIMITS

    @classmethod
    def parse(cls, text: str) -> Condition:
        """ValueError for what is no condition."""
        found = _CONDITION.fullmatch(text)
        if found is None or (found[1] and found[1] not in NUMBERS):
            raise ValueError(f"learner/alarms/rules.toml: {text!r} is no condition")
        limit = found[4] if found[4] in LIMITS else float(found[4])
        return cls(found[2], NUMBERS[found[1]] if found[1] else now, found[3] == ">", limit)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    level: Literal["warning", "critical"]
    when: tuple[tuple[Condition, ...], ...]  # alternatives, each of conditions that hold together
    holds: int  # steps in a row
    message: str
    cause: str
    look_at: str
    cure: str
    endings: tuple[str, ...] = ()  # of the episodes behind it
    lowest: bool = False  # the episodes behind it are those of the lowest reward
    logged: bool = True

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.metric for conditions in self.when for c in conditions))


def read_rules() -> tuple[Rule, ...]:
    tables = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    rules = []
    for name, table in tables.items():
        when = tuple(tuple(map(Condition.parse, text.split(" and "))) for text in table.pop("when"))
        rules.append(Rule(name, when=when, endings=tuple(table.pop("endings", ())), **table))
    return tuple(rules)


def limits_of(recipe: Mapping[str, Any]) -> dict[str, float]:
    """LIMITS for a recipe, given as recipe.json has it; what it lacks has its default."""
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
