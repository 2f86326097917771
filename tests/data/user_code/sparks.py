"""An environment of gymnasium's kind that is registered at import: a spark in a row of lamps; walk it to the right end.

`form` makes it a broken one."""

from __future__ import annotations

from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

LAMPS, SIDE = 6, 8


class Sparks(gymnasium.Env):
    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None, form=""):
        self.render_mode, self.form, self.place = render_mode, form, 0
        self.observation_space = spaces.Discrete(LAMPS)
        self.action_space = {
            "vector": spaces.MultiDiscrete([2, 3]),
            "box": spaces.Box(np.float32([-0.3, 0.0]), np.float32([0.3, 9.0])),
            "text": spaces.Text(8, charset="abc"),
            "bits": spaces.MultiBinary(2),
            "dict": spaces.Dict({"hand": spaces.Discrete(2), "at": spaces.Box(0, 1, (2,))}),
        }.get(form, spaces.Discrete(2, start=3))
        self.heard = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(3))
        return self.place, {}

    def step(self, action):
        self.heard.append(action)
        self.place = min(max(self.place + (1 if action == 4 else -1), 0), LAMPS - 1) if np.ndim(action) == 0 else 0
        over = self.place == LAMPS - 1
        if self.form == "gym":
            return self.place, float(over), over, {}
        info = {"is_success": False} if self.form == "says no" else {}
        return self.place, float(over), over, False, info

    def render(self):
        frame = np.zeros((SIDE, SIDE * LAMPS, 3), np.uint8)
        frame[:, SIDE * self.place : SIDE * (self.place + 1)] = 255
        return {"float": frame / 255, "list": [frame], "none": None}.get(self.form, frame)


gymnasium.register("Sparks-v0", entry_point=Sparks, max_episode_steps=6)
