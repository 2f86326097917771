"""Name the colour of a square, drawn or told in numbers: the smallest task a model can be trained on, one turn long."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from PIL import Image
from pydantic import Field

from envs.base import Env, Info, Observation, seed_of
from envs.env_settings import EnvSettings, read_settings

COLOURS = {"red": (220, 40, 40), "green": (50, 190, 70), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
SYSTEM_PROMPT = "Name the colour of the square: red, green, blue or yellow. Answer with one word."
PIXELS = 32


class ColourSettings(EnvSettings):
    render_mode: Literal["vision", "text"] = Field(
        "vision", description="how the square is shown: vision, or text, its red, green and blue"
    )


SETTINGS = ColourSettings


def build_env(sample: Any = None, args: Any = None, **_: Any) -> ColourEnv:
    """Return the environment for metadata["seed"], or for seed 0 without a sample. Raise ValueError for a sample
    without a seed."""
    is_text = read_settings(ColourSettings, sample, args).render_mode == "text"
    return ColourEnv(Random(seed_of(sample)).choice(list(COLOURS)), is_text=is_text)


def told(colour: str) -> str:
    """Return the square in words."""
    red, green, blue = COLOURS[colour]
    return f"The square has red {red}, green {green}, blue {blue}. "


class ColourEnv(Env):
    """One question, reward 1.0 for the right word and 0.0 otherwise."""

    def __init__(self, colour: str, *, is_text: bool = False) -> None:
        self.colour, self.is_text = colour, is_text

    def reset(self) -> tuple[Observation, Info]:
        if self.is_text:
            return {"obs_str": f"{told(self.colour)}Which colour?"}, {"metrics": {"success": 0.0, "format": 0.0}}
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
