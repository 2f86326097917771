"""Frozen lakes: one frozen record, its moves on firm and slippery ice, and random lakes that can be crossed.

Cells are numbered row by row: cell = row * width + column. A lake has no wall around it: a move off its
edge leads nowhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from PIL import ImageDraw

from envs.boards.board import STEPS, split_of
from envs.boards.tile_sets import TileSet, disc, framed
from envs.boards.walks import shortest_way

ICE, HOLE, GOAL, PLAYER, PLAYER_IN_HOLE, PLAYER_AT_GOAL = range(6)
SYMBOLS = "_OGPX√"
LETTERS = {"S": ICE, "F": ICE, "H": HOLE, "G": GOAL}  # Gymnasium's
MAX_TRIES = 20_000


@dataclass(frozen=True)
class Lake:
    """A position. `cells` holds ICE, HOLE or GOAL for each cell."""

    height: int
    width: int
    cells: bytes
    player: int

    @property
    def goal(self) -> int:
        return self.cells.index(GOAL)

    @property
    def holes(self) -> tuple[int, ...]:
        return tuple(cell for cell, code in enumerate(self.cells) if code == HOLE)

    @property
    def solved(self) -> bool:
        return self.cells[self.player] == GOAL

    @property
    def over(self) -> bool:
        """Tell whether the player is at the goal or in a hole."""
        return self.cells[self.player] != ICE

    def codes(self) -> bytes:
        """Return the code, 0 to 5, of what is visible in each cell."""
        codes = bytearray(self.cells)
        codes[self.player] = {ICE: PLAYER, HOLE: PLAYER_IN_HOLE, GOAL: PLAYER_AT_GOAL}[self.cells[self.player]]
        return bytes(codes)

    def moved(self, move: str) -> Lake:
        """Return the lake after one move; the lake itself at its edge, and when the game is over."""
        row, column = divmod(self.player, self.width)
        down, right = STEPS[move]
        row, column = row + down, column + right
        if self.over or not (0 <= row < self.height and 0 <= column < self.width):
            return self
        return replace(self, player=row * self.width + column)


SIDES = {"up": ("left", "right"), "down": ("left", "right"), "left": ("up", "down"), "right": ("up", "down")}


def outcomes(lake: Lake, move: str, success_rate: float) -> list[tuple[float, Lake]]:
    """Return what a move on slippery ice may lead to, each with its probability: the way that was meant, and each of
    the two ways at right angles to it with half of the rest."""
    aside = (1 - success_rate) / 2
    ways = [(success_rate, move), *((aside, side) for side in SIDES[move])]
    return [(chance, lake.moved(way)) for chance, way in ways if chance > 0]


def slipped(rng: random.Random, move: str, success_rate: float) -> str:
    """Return the way that a move on slippery ice takes."""
    drawn = rng.random()
    if drawn < success_rate:
        return move
    return SIDES[move][drawn >= success_rate + (1 - success_rate) / 2]


@dataclass(frozen=True, slots=True)
class LakeSpec:
    """How random lakes are drawn. Of several sizes each lake draws one."""

    sizes: tuple[tuple[int, int], ...] = ((4, 4),)
    hole_chance: float = 0.2
    corners: bool = False
    min_solution: int = 1
    max_solution: int = 1_000_000
    split: str = ""  # "", "train" or "heldout"

    def __post_init__(self) -> None:
        for height, width in self.sizes:
            if min(height, width) < 1 or height * width < 2 or max(height, width) > 50:
                raise ValueError(f"grid_size {height}x{width}: use 2 cells at least and 50x50 at most")


def make_lake(seed: int | str, spec: LakeSpec) -> Lake:
    """Return the lake of `seed`, which can be crossed; the same on every machine. Raise ValueError if none of MAX_TRIES
    lakes fits `spec`."""
    rng = random.Random(seed)
    for _ in range(MAX_TRIES):
        height, width = spec.sizes[rng.randrange(len(spec.sizes))]
        size = height * width
        start, goal = (0, size - 1) if spec.corners else rng.sample(range(size), 2)
        cells = bytearray(HOLE if rng.random() < spec.hole_chance else ICE for _ in range(size))
        cells[start], cells[goal] = ICE, GOAL
        lake = Lake(height, width, bytes(cells), start)
        moves = len(shortest_way(lake))
        if (
            moves
            and spec.min_solution <= moves <= spec.max_solution
            and split_of(lake) == (spec.split or split_of(lake))
        ):
            return lake
    raise ValueError(f"no lake found in {MAX_TRIES} tries for {spec}: relax size, hole_chance or solution length")


def lake_of(rows: tuple[str, ...]) -> Lake:
    """Return the lake of a map in Gymnasium's letters: S start, F ice, H hole, G goal. Raise ValueError for another
    letter, rows of several lengths, more than one start or goal, or a goal that cannot be reached."""
    text = "".join(rows)
    if any(len(a) != len(b) for a, b in pairwise(rows)) or not text:
        raise ValueError(f"desc = {list(rows)}: write rows of one length")
    if wrong := sorted(set(text) - set(LETTERS)):
        raise ValueError(f"desc = {list(rows)}: {wrong[0]!r} is none of S (start), F (ice), H (hole), G (goal)")
    if text.count("S") != 1 or text.count("G") != 1:
        raise ValueError(f"desc = {list(rows)}: write one S and one G")
    lake = Lake(len(rows), len(rows[0]), bytes(LETTERS[letter] for letter in text), text.index("S"))
    if not shortest_way(lake):
        raise ValueError(f"desc = {list(rows)}: no way leads from S to G")
    return lake


_GROUND, _SNOW, _WATER, _DEEP, _RED, _POLE, _GREEN, _DARK, _BLUE = range(9)
_COLOURS = ((208, 232, 244), (236, 246, 252), (40, 90, 160), (16, 40, 90), (220, 40, 40), (90, 60, 30), (60, 200, 80),
            (20, 90, 35), (120, 160, 200))  # fmt: skip


def _draw(draw: ImageDraw.ImageDraw, code: int, p: int) -> None:
    line = max(1, p // 16)
    if code in (HOLE, PLAYER_IN_HOLE):
        draw.rectangle((0, 0, p - 1, p - 1), fill=_WATER)
        disc(draw, p, _DEEP, _DEEP, p // 8)
    else:
        framed(draw, p, _GROUND, _BLUE, 0)
        draw.line((p // 4, p // 2, p // 2, p // 4), fill=_SNOW, width=line)
    if code in (GOAL, PLAYER_AT_GOAL):
        draw.rectangle((p // 3, p // 8, p // 3 + line, p - p // 8), fill=_POLE)
        draw.polygon(((p // 3 + line, p // 8), (p - p // 8, p // 4 + line), (p // 3 + line, p // 2)), fill=_RED)
    if code in (PLAYER, PLAYER_IN_HOLE, PLAYER_AT_GOAL):
        disc(draw, p, _GREEN, _DARK, p // 8 if code == PLAYER else p // 3)


TILES = TileSet(_COLOURS, SYMBOLS, _draw)
