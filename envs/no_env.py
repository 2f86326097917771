"""No environment: for samples that an agent plays by itself (`rollout.agent`), which is given all that they have."""

from __future__ import annotations

from typing import Any

from envs.base import Env, Info, Observation


def build_env(sample: Any = None, args: Any = None, **_: Any) -> NoEnv:
    """Return an environment in which nothing happens."""
    return NoEnv()


class NoEnv(Env):
    """An environment that shows nothing and ends with the first answer."""

    def reset(self) -> tuple[Observation, Info]:
        return {}, {}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        return {}, True, {}
