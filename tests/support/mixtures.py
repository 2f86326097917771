"""Recipes of several tasks, small enough for the smallest model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIMITS = {"max_turns": 1, "max_tokens": 4, "turn_tokens": 4}
HEAD = """
[run]
name = "mixture"
[model]
path = "launch/models/colour_tiny"
max_context = 128
[env]
max_turns = 1
max_tokens = 4
turn_tokens = 4
[actor]
groups = 4
[learner]
group_size = 2
groups_per_step = 4
total_steps = 4
max_staleness = 1
resume = "never"
[learner.objective]
name = "grpo"
[learner.optimizer]
lr = 1e-3
[learner.checkpoint]
every = 2
[eval]
samples = 4
"""
THREE = """
[[tasks]]
name = "plain"
module = "envs.colour"
weight = 2
[[tasks]]
name = "few"
module = "envs.colour"
data = { num_samples = 3 }
group_size = 3
[[tasks]]
name = "late"
module = "envs.colour"
data = { first_seed = 1000 }
max_tokens = 3
turn_tokens = 3
"""


def mixture_toml(folder: Path, tasks: str = THREE, more: str = "", head: str = HEAD) -> str:
    """Write a recipe of several tasks and return its path."""
    path = folder / "mixture.toml"
    path.write_text(head + more + tasks)
    return str(path)


def values_of(tasks: list[dict[str, Any]], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe of these tasks, whose limits are short."""
    model = {"path": "launch/models/colour_tiny", "max_context": 128}
    learner = {"group_size": 2, "groups_per_step": 4, "objective": {"name": "grpo"}}
    return {"model": model, "env": LIMITS, "learner": learner, "actor": {"groups": 4}, "tasks": tasks} | sections
