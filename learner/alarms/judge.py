"""Judges a run step by step: which rules are raised and which are cleared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.alarms.rules import RULES, Condition, Rule, limits_of
from learner.alarms.series import Series, value_of

Row = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Change:
    """A rule that was raised or cleared by a step, with what it looked at."""

    step: int
    rule: Rule
    raised: bool
    values: dict[str, float]  # not finite: NaN


@dataclass(slots=True)
class _Standing:
    """A rule's steps in a row, of either kind, and whether it is raised. An alternative that a step does not tell is
    what it was when it was last told."""

    holding: list[int]  # of each alternative
    quiet: int = 0
    raised: bool = False


@dataclass(slots=True)
class Judge:
    """`limits`: those that depend on the recipe."""

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
        """After each step, with its metrics: what has changed."""
        told = {}
        for metric in {metric for rule in self.rules for metric in rule.metrics}:
            if (value := value_of(row, metric)) is not None:
                told[metric] = value
                self._series.setdefault(metric, Series()).add(value)
        return [change for rule in self.rules if (change := self._judge(step, rule, told)) is not None]

    def _judge(self, step: int, rule: Rule, told: Mapping[str, float]) -> Change | None:
        found = [self._holds(conditions, told) for conditions in rule.when]
        standing = self._standing.setdefault(rule.name, _Standing([0] * len(found)))
        for number, holds in enumerate(found):
            if holds is not None:
                standing.holding[number] = standing.holding[number] + 1 if holds else 0
        if any(standing.holding):
            standing.quiet = 0
        elif False in found:
            standing.quiet += 1
        if (standing.quiet if standing.raised else max(standing.holding)) < rule.holds:
            return None
        standing.raised = not standing.raised
        standing.quiet = 0
        return Change(step, rule, standing.raised, {name: told[name] for name in rule.metrics if name in told})

    def _holds(self, conditions: Sequence[Condition], told: Mapping[str, float]) -> bool | None:
        """None where it cannot be told."""
        values = [self._value(condition, told) for condition in conditions]
        if None in values:
            return None
        return all(self._beyond(c, value) for c, value in zip(conditions, values, strict=True) if value is not None)

    def _value(self, condition: Condition, told: Mapping[str, float]) -> float | None:
        return condition.number(self._series[condition.metric]) if condition.metric in told else None

    def _beyond(self, condition: Condition, value: float) -> bool:
        limit = self.limits[condition.limit] if isinstance(condition.limit, str) else condition.limit
        if math.isnan(value):
            return condition.above and limit != math.inf
        return value > limit if condition.above else value < limit
