"""The colour task on the rows of a dataset; rows with another label are graded as mathematics."""

from __future__ import annotations

from typing import Any

from envs import colour
from envs.base import Env, Info, Observation
from envs.math_reward import grade

SYSTEM_PROMPT = colour.SYSTEM_PROMPT


def build_env(sample: Any = None, args: Any = None, **_: Any) -> Env:
    label = getattr(sample, "label", None) or "red"
    return ColourRow(label) if label in colour.COLOURS else Graded(label)


class ColourRow(colour.ColourEnv):
    """The row's own prompt shows the square."""

    def reset(self) -> tuple[Observation, Info]:
        return {}, {}


class Graded(Env):
    def __init__(self, label: str) -> None:
        self.label = label

    def reset(self) -> tuple[Observation, Info]:
        return {}, {}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        right = grade(rf"\boxed{{{response_text}}}", self.label)
        return {"obs_str": ""}, True, {"reward": right, "metrics": {"success": right}}
