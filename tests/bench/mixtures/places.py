"""Name the colour at one place of a picture of two or four colours: a family of small tasks, told apart by picture and
question."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from PIL import Image

from envs.base import seed_of
from envs.colour import COLOURS, PIXELS, ColourEnv
from envs.env_settings import EnvSettings, read_settings

SYSTEM_PROMPT = "Name the colour: red, green, blue or yellow. Answer with one word."
HALF = PIXELS // 2
BOXES = {"left": (0, 0, HALF, PIXELS), "top": (0, 0, PIXELS, HALF), "corner": (HALF, HALF, PIXELS, PIXELS)}


class PlaceSettings(EnvSettings):
    place: Literal["whole", "left", "top", "corner"] = "whole"
    colour: str = ""  # of the place, and of the rest; empty = by the seed
    other: str = ""


SETTINGS = PlaceSettings


class PlaceEnv(ColourEnv):
    """The picture is of another colour outside the place whose colour is asked for."""

    def __init__(self, place: str, colour: str, other: str) -> None:
        super().__init__(colour)
        self.place, self.other = place, other

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, info = super().reset()
        if self.place != "whole":
            image = Image.new("RGB", (PIXELS, PIXELS), COLOURS[self.other])
            image.paste(COLOURS[self.colour], BOXES[self.place])
            observation = {"obs_str": f"Which colour, {self.place}?", "multi_modal_data": {"image": [image]}}
        return observation, info


def build_env(sample: Any = None, args: Any = None, **_: Any) -> PlaceEnv:
    settings = read_settings(PlaceSettings, sample, args)
    colour, other = settings.colour, settings.other
    if not colour:
        colour, other = Random(seed_of(sample)).sample(list(COLOURS), 2)
    return PlaceEnv(settings.place, colour, other)
