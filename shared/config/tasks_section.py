"""The list `tasks` of a recipe: several tasks in one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shared.config.data_section import DataConfig
from shared.config.sections import NAME, Section

OF_URLS = ("http://", "https://")


class TaskConfig(Section):
    """One of several tasks. What it leaves out, or sets to 0 or "", is as in `env`."""

    name: str = Field(..., pattern=NAME, description="its name in metrics and samples: letters, digits, - _ and .")
    module: str = Field(..., min_length=1, description="dotted path or .py file that holds build_env")
    weight: float = Field(1.0, description="its share of the groups, relative to the other tasks' weights")
    args: dict[str, Any] = Field(default_factory=dict, description="settings handed to build_env as `args`")
    data: DataConfig = Field(DataConfig(), description="its samples, with the fields of the section data")
    reward: str = Field("", description="function, or URL of a server, that rewards episodes; empty = the env's own")
    group_size: int = Field(0, ge=0, description="episodes of one sample; 0 = learner.group_size")
    max_turns: int = Field(0, ge=0, description="turns of one episode; 0 = env.max_turns")
    max_tokens: int = Field(0, ge=0, description="model tokens of one episode; 0 = env.max_tokens")
    turn_tokens: int = Field(0, ge=0, description="model tokens of one turn; 0 = env.turn_tokens")
    timeout_s: float = Field(0.0, ge=0, description="time limit of one reset or step; 0 = env.timeout_s")
    isolation: Literal["", "thread", "process"] = Field("", description="as env.isolation; empty = that")

    @model_validator(mode="after")
    def _is_played(self) -> Self:
        if self.weight <= 0:
            raise ValueError(
                f"task {self.name!r} has weight = {self.weight:g}: give it one above 0, or leave the task out"
            )
        return self

    def values_of_env(self) -> dict[str, Any]:
        """Return the fields of `env` that this task sets."""
        own = {"module": self.module, "args": self.args, "reward": "" if self.rewarded_by_url else self.reward}
        limits = ("max_turns", "max_tokens", "turn_tokens", "timeout_s", "isolation")
        return own | {name: value for name in limits if (value := getattr(self, name))}

    @property
    def rewarded_by_url(self) -> bool:
        return self.reward.startswith(OF_URLS)


def check_names(field: str, names: Sequence[str]) -> None:
    """Raise ValueError if a name occurs twice in the list `field`."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{field}: {twice[0]!r} is the name of two; give each its own")
