"""The judge, which decides after each step which rules are raised and which are cleared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.alarms.metric_history import Series, value_of
from learner.alarms.rules import RULES, Condition, Rule, limits_of

Row = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Change:
    """A rule that a step raised or cleared, with the values of its metrics."""

    step: int
    rule: Rule
    raised: bool
    values: dict[str, float]  # NaN for a value that is not finite


@dataclass(slots=True)
class _Standing:
    """A rule's numbers of consecutive steps, and whether it is raised. If a step lacks a metric of an alternative, that
    alternative's count stays as it is."""

    holding: list[int]  # consecutive steps in which each alternative has held
    quiet: int = 0
    raised: bool = False


@dataclass(slots=True)
class Judge:
    """Judges a run's steps by the rules. `limits`: the limits that depend on the recipe."""

    limits: Mapping[str, float]
    rules: Sequence[Rule] = RULES
    _series: dict[str, Series] = field(default_factory=dict)
    _standing: dict[str, _Standing] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Judge:
        return cls(limits_of(recipe))

    @property
    def raised(self) -> list[Rule]:
        return [rule for rule in self.rules if rule.name in self._standing and self._standing[rule.name].raised]

    def step(self, step: int, row: Row) -> list[Change]:
        """Judge a step by its metrics; return the rules that it raised or cleared."""
        values = {}
        for metric in {metric for rule in self.rules for metric in rule.metrics}:
            if (value := value_of(row, metric)) is not None:
                values[metric] = value
                self._series.setdefault(metric, Series()).add(value)
        return [change for rule in self.rules if (change := self._judge(step, rule, values, row)) is not None]

    def _judge(self, step: int, rule: Rule, values: Mapping[str, float], row: Row) -> Change | None:
        outcomes = [self._holds(conditions, values) for conditions in rule.when]
        standing = self._standing.setdefault(rule.name, _Standing([0] * len(outcomes)))
        for number, holds in enumerate(outcomes):
            if holds is not None:
                standing.holding[number] = standing.holding[number] + 1 if holds else 0
        if any(standing.holding):
            standing.quiet = 0
        elif False in outcomes:
            standing.quiet += 1
        if (standing.quiet if standing.raised else max(standing.holding)) < rule.holds:
            return None
        standing.raised = not standing.raised
        standing.quiet = 0
        told = [name for name in rule.metrics if name in values and name not in rule.most_of]
        shown = {name: values[name] for name in told}
        if rule.most_of:
            largest = max(rule.most_of, key=lambda name: row.get(name) or 0.0)
            shown[largest] = value_of(row, largest) or 0.0
        return Change(step, rule, standing.raised, shown)

    def _holds(self, conditions: Sequence[Condition], values: Mapping[str, float]) -> bool | None:
        """Tell whether all conditions hold; None if a value is unknown."""
        numbers = [self._value(condition, values) for condition in conditions]
        if None in numbers:
            return None
        return all(self._beyond(c, value) for c, value in zip(conditions, numbers, strict=True) if value is not None)

    def _value(self, condition: Condition, values: Mapping[str, float]) -> float | None:
        return condition.number(self._series[condition.metric]) if condition.metric in values else None

    def _beyond(self, condition: Condition, value: float) -> bool:
        limit = self.limits[condition.limit] if isinstance(condition.limit, str) else condition.limit
        if math.isnan(value):
            return condition.above and limit != math.inf
        return value > limit if condition.above else value < limit
