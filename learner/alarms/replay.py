"""The rules over a recorded run's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from learner.alarms.judge import Judge
from learner.alarms.records import Alarm
from learner.alarms.rules import RULES

_WANTED = {"time", *(metric for rule in RULES for metric in rule.metrics)}
_OF_A_STEP = "rollout/reward"  # the rows of steps have it, those of evaluations do not


def read_steps(path: Path, last: int | None = None) -> dict[int, dict[str, float | None]]:
    """The rules' metrics of each step up to `last`, in order. Of a step that a restart made again the later row counts;
    lines that are damaged are left out."""
    found: dict[int, dict[str, float | None]] = {}
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                row = _row(line)
                if row and (last is None or row["step"] <= last):
                    found[row["step"]] = {name: row[name] for name in _WANTED & row.keys()}
    return dict(sorted(found.items()))


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
    """The judge after a run's last step, and all that was raised and cleared. ValueError, in one line, for a folder
    without metrics."""
    steps = read_steps(folder / "metrics.jsonl")
    if not steps:
        raise ValueError(f"{folder} has no metrics.jsonl with a step in it; give a run's folder, as runs/sokoban_tiny")
    judge, found = Judge.of(recipe_of(folder)), []
    for step, row in steps.items():
        found += [Alarm.of(change, at=row.get("time") or 0.0) for change in judge.step(step, row)]
    return judge, found


def recipe_of(folder: Path) -> dict[str, Any]:
    """ValueError where the folder holds no recipe."""
    path = folder / "recipe.json"
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read, so that the rules' limits are not known: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is no recipe")
    return recipe
