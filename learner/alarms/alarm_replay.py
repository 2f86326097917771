"""The alarms of a recorded run, computed again from its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from learner.alarms.alarm_records import Alarm
from learner.alarms.judge import Judge
from learner.alarms.rules import RULES

_WANTED = {"time", *(metric for rule in RULES for metric in rule.metrics)}
_OF_A_STEP = "rollout/reward"  # in the rows of steps, not in those of evaluations


def read_steps(path: Path, last: int | None = None) -> dict[int, dict[str, float | None]]:
    """Return the metrics that the rules need, for each step up to `last`, in order. If a restart repeated a step, its
    later row counts; damaged lines are left out."""
    rows: dict[int, dict[str, float | None]] = {}
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                row = _row(line)
                if row and (last is None or row["step"] <= last):
                    rows[row["step"]] = {name: row[name] for name in _WANTED & row.keys()}
    return dict(sorted(rows.items()))


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or _OF_A_STEP not in row:
        return {}
    numbers = (int, float, type(None))
    return row if all(isinstance(row[name], numbers) for name in _WANTED & row.keys()) else {}


def replay(folder: Path) -> tuple[Judge, list[Alarm]]:
    """Return the judge after a run's last step, and all alarms that were raised and cleared. Raise ValueError, in one
    line, for a folder without metrics."""
    steps = read_steps(folder / "metrics.jsonl")
    if not steps:
        raise ValueError(f"{folder} has no metrics.jsonl with a step in it; give a run's folder, as runs/sokoban_tiny")
    judge, changes = Judge.of(recipe_of(folder)), []
    for step, row in steps.items():
        changes += [Alarm.of(change, at=row.get("time") or 0.0) for change in judge.step(step, row)]
    return judge, changes


def recipe_of(folder: Path) -> dict[str, Any]:
    """Return the content of the run's recipe.json. Raise ValueError if the folder holds no recipe."""
    path = folder / "recipe.json"
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read, so that the rules' limits are not known: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is no recipe")
    return recipe
