"""The colour task with episodes that raise, hang, or answer nonsense."""

from __future__ import annotations

import random
import time
from typing import Any

from envs import colour
from envs.base import Info, Observation, setting

SYSTEM_PROMPT = colour.SYSTEM_PROMPT


def build_env(sample: Any = None, args: Any = None, **_: Any) -> ChaosEnv:
    """`args`: share of episodes that raise, that hang, and for how long."""
    return ChaosEnv(colour.build_env(sample).colour, args)


class ChaosEnv(colour.ColourEnv):
    def __init__(self, name: str, args: Any) -> None:
        super().__init__(name)
        self.fate, self.args = random.random(), args

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        raises, hangs = setting(self.args, "raises", 0.0), setting(self.args, "hangs", 0.0)
        if self.fate < raises:
            raise RuntimeError("the environment fell over")
        if self.fate < raises + hangs:
            time.sleep(setting(self.args, "hang_s", 3.0))
        return super().step(response_text)
