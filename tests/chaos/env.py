"""The colour task with episodes that raise or hang for as long as a file in a folder says so."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from envs import colour
from envs.base import Info, Observation, setting

SYSTEM_PROMPT = colour.SYSTEM_PROMPT
SHARES = {"raise": 0.15, "hang": 0.05}  # of the episodes played meanwhile


def build_env(sample: Any = None, args: Any = None, **_: Any) -> ChaosEnv:
    """`args`: `folder`, where the files `raise` and `hang` appear; `hang_s`, how long an episode then hangs; `step_s`,
    how long a step takes otherwise."""
    return ChaosEnv(colour.build_env(sample).colour, args)


class ChaosEnv(colour.ColourEnv):
    def __init__(self, name: str, args: Any) -> None:
        super().__init__(name)
        self.folder, self.hang_s = Path(setting(args, "folder", ".")), setting(args, "hang_s", 3.0)
        self.step_s = setting(args, "step_s", 0.0)

    def reset(self) -> tuple[Observation, Info]:
        if "CHAOS_SICK" in os.environ:
            raise FileNotFoundError("/data/levels.bin is not on this host")
        return super().reset()

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        if self.struck_by("raise"):
            raise RuntimeError("the environment fell over")
        if self.struck_by("hang"):
            time.sleep(self.hang_s)
        time.sleep(self.step_s * (2.5 if "CHAOS_SLOW" in os.environ else 1.0))
        return super().step(response_text)

    def struck_by(self, fault: str) -> bool:
        return (self.folder / fault).exists() and random.random() < SHARES[fault]
