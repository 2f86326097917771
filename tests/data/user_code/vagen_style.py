"""An environment in the style of VAGEN's: walk a dot to the right edge. `form` makes it a broken one."""

from __future__ import annotations

import asyncio
from random import Random

from PIL import Image

WIDTH, CELL = 4, 8


class Dot:
    def __init__(self, env_config):
        self.config = env_config
        self.form = env_config.get("form", "")
        self.place = 0

    async def system_prompt(self):
        await asyncio.sleep(0)
        if self.form == "no prompt":
            return None
        return {"obs_str": f"Move the dot to the right edge. {self.config.get('hint', '')}Answer left or right."}

    async def reset(self, seed):
        self.place = Random(seed).randrange(WIDTH - 1)
        return await asyncio.to_thread(self.look), {}

    async def step(self, action_str):
        moved = {"left": -1, "right": 1}.get(action_str.strip().lower(), 0)
        self.place = min(max(self.place + moved, 0), WIDTH - 1)
        success = self.place == WIDTH - 1
        metrics = {"turn_metrics": {"action_is_valid": moved != 0}, "traj_metrics": {"success": success}}
        info = {"metrics": metrics, "success": success}
        if self.form == "gym":
            return self.look(), float(success), success, False, info
        if self.form == "ours":
            return self.look(), success, info
        return self.look(), float(success), success, info

    def look(self):
        image = Image.new("RGB", (WIDTH * CELL, CELL))
        image.paste("white", (CELL * self.place, 0, CELL * (self.place + 1), CELL))
        if self.form == "text":
            return {"obs_str": f"The dot is at {self.place}."}
        name = "multi_modal_data" if self.form == "former" else "multi_modal_input"
        text = "You see" if self.form == "no place" else "You see <image>. What next?"
        return {"obs_str": text, name: {"<audio>" if self.form == "audio" else "<image>": [image]}}

    async def close(self):
        await asyncio.sleep(0)


class Half:
    def reset(self, seed):
        return {}, {}
