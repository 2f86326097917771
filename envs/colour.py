"""Name the colour of a drawn square: the smallest task a vision-language model can be trained on, one turn long."""

from __future__ import annotations

from random import Random
from typing import Any

from PIL import Image

from envs.base import Env, Info, Observation, seed_of
from envs.env_settings import EnvSettings

COLOURS = {"red": (220, 40, 40), "green": (50, 190, 70), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
SYSTEM_PROMPT = "Name the colour of the square: red, green, blue or yellow. Answer with one word."
PIXELS = 32
SETTINGS = EnvSettings  # no settings of its own


def build_env(sample: Any = None, args: Any = None, **_: Any) -> ColourEnv:
    """Return the environment for metadata["seed"], or for seed 0 without a sample. Raise ValueError for a sample
    without a seed."""
    return ColourEnv(Random(seed_of(sample)).choice(list(COLOURS)))


class ColourEnv(Env):
    """One question, reward 1.0 for the right word and 0.0 otherwise."""

    def __init__(self, colour: str) -> None:
        self.colour = colour

    def reset(self) -> tuple[Observation, Info]:
        image = Image.new("RGB", (PIXELS, PIXELS), COLOURS[self.colour])
        return {"obs_str": "Which colour?", "multi_modal_data": {"image": [image]}}, {
            "metrics": {"success": 0.0, "format": 0.0}
        }

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        words = response_text.lower().split()
        word = words[0].strip(".,!*\"'") if words else ""
        right = float(word == self.colour)
        metrics = {"success": right, "format": float(word in COLOURS)}
        return {"obs_str": "Right." if right else "Wrong."}, True, {"reward": right, "metrics": metrics}
