"""Drawn triangle problems: an endless supply of simple geometry problems, each with its image and answer."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal, get_args

from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from envs.datasets import data_uri
from envs.env_settings import EnvSettings
from envs.splits import split_of_bytes

Kind = Literal["angle_sum", "isosceles", "exterior", "right_angle", "pythagoras"]
KIND_NAMES: tuple[Kind, ...] = get_args(Kind)
_TRIPLES = ((3, 4, 5), (6, 8, 10), (5, 12, 13), (8, 15, 17), (9, 12, 15), (12, 16, 20), (7, 24, 25), (20, 21, 29))
Point = tuple[float, float]


class TriangleSettings(EnvSettings):
    """How a problem is drawn."""

    kinds: tuple[Kind, ...] = Field(KIND_NAMES, min_length=1, description="of drawn problems")
    angle_step: int = Field(5, ge=1, le=30, description="angles of drawn triangles are multiples of it, degrees")
    picture_pixels: int = Field(160, ge=48, le=2048, description="side of the drawn picture")
    text_grid: int = Field(
        1,
        ge=1,
        le=32,
        description="what is written in the picture begins at multiples of so many pixels: a small vision tower reads "
        "what stands in one of its patches",
    )


DEFAULT = TriangleSettings()


@dataclass(frozen=True, slots=True)
class Problem:
    """A drawn problem: `text` is the question, `answer` the label, `image` the drawing, `numbers` the numbers written
    in it, ascending."""

    text: str
    answer: str
    image: Image.Image
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Figure:
    """A problem before it is drawn: question, answer, the triangle's angles in degrees at its corners A and B, and the
    texts at its corners and sides."""

    text: str
    answer: str
    angles: tuple[float, float]
    corners: tuple[str, str, str] = ("", "", "")
    sides: tuple[str, str, str] = ("", "", "")  # AB, BC, CA

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(int(text) for text in (*self.corners, *self.sides) if text.isdigit()))


def make_problem(seed: int | str, settings: TriangleSettings = DEFAULT, split: str = "") -> Problem:
    """Return the problem of `seed`; "train" and "heldout" never share a question with the same numbers."""
    if split not in ("", "train", "heldout"):
        raise ValueError(f"split is {split!r}: use train, heldout or leave it out")
    rng, kinds, step = Random(seed), settings.kinds, settings.angle_step
    for _ in range(1000):
        figure = _FIGURES[kinds[rng.randrange(len(kinds))]](rng, step)
        if not split or _split_of(figure) == split:
            image = _draw(figure, rng, settings.picture_pixels, settings.text_grid)
            return Problem(figure.text, figure.answer, image, figure.numbers)
    raise ValueError(f"kinds {list(kinds)} with angle_step {step} have no {split} problem: use a smaller step")


def rows(count: int, split: str = "", seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield problems as rows of a geometry dataset: `problem`, `answer`, `images`."""
    for number in range(count):
        problem = make_problem(f"{seed}/{number}", split=split)
        buffer = io.BytesIO()
        problem.image.save(buffer, "PNG")
        yield {"problem": f"<image>{problem.text}", "answer": problem.answer, "images": [data_uri(buffer.getvalue())]}


def _split_of(figure: _Figure) -> str:
    written = repr((figure.text, sorted(figure.corners), sorted(figure.sides)))
    return split_of_bytes(written.encode())


def _angle_sum(rng: Random, step: int) -> _Figure:
    a, b = _two_angles(rng, step)
    return _Figure("Find x, in degrees.", str(180 - a - b), (a, b), (f"{a}", f"{b}", "x"))


def _isosceles(rng: Random, step: int) -> _Figure:
    base = _multiple(rng, step, 30, 75)
    return _Figure("The two marked sides are equal. Find x, in degrees.", str(180 - 2 * base), (base, base),
                   (f"{base}", "", "x"), ("", "=", "="))  # fmt: skip


def _exterior(rng: Random, step: int) -> _Figure:
    a, b = _two_angles(rng, step)
    return _Figure("x is the exterior angle at the unmarked corner. Find x, in degrees.", str(a + b), (a, b),
                   (f"{a}", f"{b}", ""))  # fmt: skip


def _right_angle(rng: Random, step: int) -> _Figure:
    a = _multiple(rng, step, 20, 70)
    return _Figure("One angle is a right angle. Find x, in degrees.", str(90 - a), (90, a), ("90", f"{a}", "x"))


def _pythagoras(rng: Random, step: int) -> _Figure:
    a, b, c = _TRIPLES[rng.randrange(len(_TRIPLES))]
    if rng.random() < 0.5:
        a, b = b, a
    angle = math.degrees(math.atan2(b, a))
    hidden = rng.randrange(3)
    sides = tuple("x" if i == hidden else f"{side}" for i, side in enumerate((a, c, b)))
    return _Figure("The triangle has a right angle. Find x.", str((a, c, b)[hidden]), (90, angle), ("90", "", ""),
                   (sides[0], sides[1], sides[2]))  # fmt: skip


_FIGURES: dict[str, Callable[[Random, int], _Figure]] = dict(
    zip(KIND_NAMES, (_angle_sum, _isosceles, _exterior, _right_angle, _pythagoras), strict=True)
)


def _multiple(rng: Random, step: int, low: int, high: int) -> int:
    return step * rng.randint(math.ceil(low / step), high // step)


def _two_angles(rng: Random, step: int) -> tuple[int, int]:
    while True:
        a, b = _multiple(rng, step, 30, 100), _multiple(rng, step, 30, 100)
        if 180 - a - b >= 30:
            return a, b


def _draw(figure: _Figure, rng: Random, pixels: int, grid: int) -> Image.Image:
    """Return a palette image, black on white, with the triangle rotated at random."""
    corners = _corners(figure.angles, rng.uniform(0, 360), pixels)
    image = Image.new("P", (pixels, pixels), 1)
    image.putpalette(bytes((0, 0, 0, 255, 255, 255)))
    draw, font = ImageDraw.Draw(image), _font(max(10, pixels // 11))
    draw.polygon(corners, outline=0, width=max(1, pixels // 80))
    middle = (sum(x for x, _ in corners) / 3, sum(y for _, y in corners) / 3)
    for text, corner in zip(figure.corners, corners, strict=True):
        _write(draw, text, _between(corner, middle, 0.32), font, grid)
    for index, text in enumerate(figure.sides):
        a, b = corners[index], corners[(index + 1) % 3]
        _write(draw, text, _between(_between(a, b, 0.5), middle, -0.32), font, grid)
    return image


def _corners(angles: tuple[float, float], turn: float, pixels: int) -> list[Point]:
    a, b = (math.radians(angle) for angle in angles)
    side = math.sin(b) / math.sin(a + b)  # length of AC, for AB = 1
    shape = [(0.0, 0.0), (1.0, 0.0), (side * math.cos(a), side * math.sin(a))]
    c, s = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    rotated = [(x * c - y * s, x * s + y * c) for x, y in shape]
    left, top = min(x for x, _ in rotated), min(y for _, y in rotated)
    width, height = max(x for x, _ in rotated) - left, max(y for _, y in rotated) - top
    scale, margin = pixels * 0.72 / max(width, height), pixels / 2
    return [((x - left - width / 2) * scale + margin, (y - top - height / 2) * scale + margin) for x, y in rotated]


def _between(a: Point, b: Point, share: float) -> Point:
    return a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share


def _write(draw: ImageDraw.ImageDraw, text: str, at: Point, font: Any, grid: int) -> None:
    if text:
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        x, y = at[0] - (right - left) / 2, at[1] - (bottom - top) / 2
        if grid > 1:
            x, y = grid * round(x / grid), grid * round(y / grid)
        draw.text((x - left, y - top), text, fill=0, font=font)


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
