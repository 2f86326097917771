"""Drawn scenes with a question: coloured shapes on a grid, to be counted or pointed at."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageDraw

from envs.boards.tile_sets import TileSet, disc, framed
from envs.splits import split_of_bytes

QuestionKind = Literal["count", "point"]
QUESTION_KINDS: tuple[QuestionKind, ...] = get_args(QuestionKind)
COLOURS = ("red", "blue", "yellow", "green")
SHAPES = ("circle", "square", "triangle")
NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
MAX_TRIES = 1_000


@dataclass(frozen=True)
class Thing:
    """A shape in a scene: `name` is a number into NAMES; `right` and `down` are how far it is moved from the middle of
    its cell, in shares of the cell."""

    cell: int
    name: int
    right: float = 0.0
    down: float = 0.0


@dataclass(frozen=True)
class Scene:
    """A scene and its question about things of one name. Of the things that are asked for with "point" there is one."""

    height: int
    width: int
    things: tuple[Thing, ...]  # in the order of their cells
    kind: QuestionKind
    asked: int

    @property
    def question(self) -> str:
        name = NAMES[self.asked]
        return f"How many {name}s are there?" if self.kind == "count" else f"Point at the {name}."

    @property
    def matches(self) -> tuple[Thing, ...]:
        """The things that the question is about."""
        return tuple(thing for thing in self.things if thing.name == self.asked)

    def corner(self, thing: Thing, pixels: int) -> tuple[int, int]:
        """Return x and y of the upper left corner of a thing's square, whose side is `pixels` as a cell's."""
        row, column = divmod(thing.cell, self.width)
        return round((column + thing.right) * pixels), round((row + thing.down) * pixels)

    def point(self, thing: Thing, pixels: int) -> str:
        """Return the middle of a thing as an answer has it: x, y."""
        x, y = self.corner(thing, pixels)
        return f"{x + pixels // 2}, {y + pixels // 2}"

    def answer(self, pixels: int) -> str:
        """Return the right answer."""
        return str(len(self.matches)) if self.kind == "count" else self.point(self.matches[0], pixels)

    def is_at(self, x: int, y: int, pixels: int) -> bool:
        """Tell whether a point lies in the square of a thing that is asked for."""
        corners = [self.corner(thing, pixels) for thing in self.matches]
        return any(left <= x < left + pixels and top <= y < top + pixels for left, top in corners)

    def render(self, pixels: int) -> Image.Image:
        """Return the scene as a palette image, `pixels` per cell."""
        picture = np.zeros((self.height * pixels, self.width * pixels), np.uint8)
        for thing in self.things:
            x, y = self.corner(thing, pixels)
            tile, place = TILES.tile(thing.name, pixels), picture[y : y + pixels, x : x + pixels]
            place[tile > 0] = tile[tile > 0]
        return TILES.picture(picture)

    def text(self, pixels: int) -> str:
        """Return the scene in words, a line for each thing."""
        return "\n".join(f"{NAMES[thing.name]} at {self.point(thing, pixels)}" for thing in self.things)


@dataclass(frozen=True, slots=True)
class SceneSpec:
    """How random scenes are drawn. Of several sizes or numbers of things each scene draws one."""

    sizes: tuple[tuple[int, int], ...] = ((4, 4),)
    num_things: tuple[int, ...] = (4, 5, 6)
    kinds: tuple[QuestionKind, ...] = QUESTION_KINDS
    names: tuple[int, ...] = tuple(range(len(NAMES)))
    max_count: int = 4
    jitter: float = 0.0
    split: str = ""  # "", "train" or "heldout"

    def __post_init__(self) -> None:
        for height, width in self.sizes:
            if min(height, width) < 1 or max(height, width) > 50 or height * width < max(self.num_things, default=0):
                raise ValueError(
                    f"grid_size {height}x{width} has no room for {max(self.num_things)} things: enlarge it"
                )
        if not self.num_things or min(self.num_things) < 1:
            raise ValueError(f"num_things is {list(self.num_things)}: use at least 1")


def make_scene(seed: int | str, spec: SceneSpec) -> Scene:
    """Return the scene of `seed`; the same on every machine. How many things are counted is drawn evenly from 0 to
    `max_count`."""
    rng = random.Random(seed)
    for _ in range(MAX_TRIES):
        scene = _draw_scene(rng, spec)
        if spec.split in ("", split_of_scene(scene)):
            return scene
    raise ValueError(f"no scene found in {MAX_TRIES} tries for {spec}: relax it")


def _draw_scene(rng: random.Random, spec: SceneSpec) -> Scene:
    height, width = spec.sizes[rng.randrange(len(spec.sizes))]
    number = spec.num_things[rng.randrange(len(spec.num_things))]
    kind = spec.kinds[rng.randrange(len(spec.kinds))]
    asked, *others = rng.sample(spec.names, len(spec.names))
    matches = rng.randint(0, min(spec.max_count, number)) if kind == "count" else 1
    names = [asked] * matches + [others[rng.randrange(len(others))] for _ in range(number - matches)]
    rng.shuffle(names)
    cells = sorted(rng.sample(range(height * width), number))
    things = []
    for cell, name in zip(cells, names, strict=True):
        right, down = (rng.uniform(-spec.jitter, spec.jitter) for _ in range(2))
        row, column = divmod(cell, width)  # what stands at the edge stays inside
        right = max(right, 0.0) if column == 0 else min(right, 0.0) if column == width - 1 else right
        down = max(down, 0.0) if row == 0 else min(down, 0.0) if row == height - 1 else down
        things.append(Thing(cell, name, right if width > 1 else 0.0, down if height > 1 else 0.0))
    return Scene(height, width, tuple(things), kind, asked)


def split_of_scene(scene: Scene) -> str:
    """Return the split of a scene with its question: "heldout" for one in eight, else "train". What is moved inside its
    cell stays in its split."""
    told = (scene.height, scene.width, [(thing.cell, thing.name) for thing in scene.things], scene.kind, scene.asked)
    return split_of_bytes(repr(told).encode())


_PALETTE = ((240, 238, 230), (40, 40, 40), (220, 40, 40), (50, 80, 220), (235, 200, 40), (50, 170, 70))


def _draw(draw: ImageDraw.ImageDraw, code: int, p: int) -> None:
    fill, shape, margin = 2 + code // len(SHAPES), SHAPES[code % len(SHAPES)], p // 8
    if shape == "circle":
        disc(draw, p, fill, 1, margin)
    elif shape == "square":
        framed(draw, p, fill, 1, margin)
    else:
        last = p - 1 - margin
        draw.polygon(((p // 2, margin), (last, last), (margin, last)), fill=fill, outline=1, width=max(1, p // 16))


TILES = TileSet(_PALETTE, NAMES, _draw)
