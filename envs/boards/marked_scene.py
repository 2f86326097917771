"""Scenes whose things bear small numbers, which are read by looking closer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from envs.boards.scene_board import NAMES, Scene, SceneSpec, Thing, make_scene

MARKS = (1, 2, 3, 4)
_INK, _LABEL = 1, 0  # of the scene's palette: dark on the ground's colour


@dataclass(frozen=True)
class MarkedScene:
    """A scene, and the number that each of its things bears. The question is about the number of one thing."""

    scene: Scene
    marks: tuple[int, ...]

    @property
    def question(self) -> str:
        return f"Which number does the {NAMES[self.scene.asked]} bear?"

    @property
    def asked(self) -> Thing:
        """The thing that the question is about."""
        return self.scene.matches[0]

    @property
    def answer(self) -> int:
        return self.marks[self.scene.things.index(self.asked)]

    def box(self, thing: Thing, pixels: int) -> tuple[int, int, int, int]:
        """Return a thing's square in thousandths of the picture's sides: left, top, right, bottom."""
        (x, y), (width, height) = self.scene.corner(thing, pixels), (self.scene.width, self.scene.height)
        edges = ((x, width), (y, height), (x + pixels, width), (y + pixels, height))
        left, top, right, bottom = (round(1000 * at / (cells * pixels)) for at, cells in edges)
        return left, top, right, bottom

    def render(self, pixels: int) -> Image.Image:
        """Return the scene as a palette image, `pixels` per cell; a number is a ninth of that high, on a label in the
        middle of its thing."""
        image = self.scene.render(pixels)
        draw, font, half = ImageDraw.Draw(image), _font(max(6, pixels // 9)), max(4, pixels // 14)
        for thing, mark in zip(self.scene.things, self.marks, strict=True):
            x, y = (at + pixels // 2 for at in self.scene.corner(thing, pixels))
            y += pixels // 10 if NAMES[thing.name].endswith("triangle") else 0
            draw.rectangle((x - half, y - half, x + half, y + half), fill=_LABEL)
            draw.text((x, y), str(mark), fill=_INK, font=font, anchor="mm")
        return image

    def text(self, pixels: int) -> str:
        """Return the scene in words without the numbers, a line for each thing."""
        return "\n".join(f"{NAMES[thing.name]} in {list(self.box(thing, pixels))}" for thing in self.scene.things)


def make_marked_scene(seed: int | str, spec: SceneSpec) -> MarkedScene:
    """Return the scene of `seed`; the same on every machine. Each thing bears one of MARKS."""
    scene = make_scene(seed, spec)
    rng = random.Random(f"{seed} marks")
    return MarkedScene(scene, tuple(rng.choice(MARKS) for _ in scene.things))


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
