"""Sliding puzzles: one frozen record, its moves, the shortest solution, and random puzzles that can be solved.

Cells are numbered row by row: cell = row * width + column. Tile 0 is the gap; a move names the way that the gap goes.
Solved, the tiles stand in order and the gap is last.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from PIL import ImageDraw, ImageFont

from envs.boards.board import MOVES, STEPS
from envs.boards.tile_sets import TileSet, framed
from envs.splits import split_of_bytes

GAP = 0
MAX_TRIES = 20_000
MAX_NODES = 300_000
MAX_CELLS = 25
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


@dataclass(frozen=True)
class Puzzle:
    """A position. `tiles` holds the tile of each cell."""

    height: int
    width: int
    tiles: bytes

    @property
    def gap(self) -> int:
        return self.tiles.index(GAP)

    @property
    def solved(self) -> bool:
        return self.tiles == ordered(self.height, self.width)

    @property
    def over(self) -> bool:
        return self.solved

    def codes(self) -> bytes:
        return self.tiles

    def moved(self, move: str) -> Puzzle:
        """Return the puzzle after the gap went one cell; the puzzle itself at its edge, and when it is solved."""
        gap = self.gap
        row, column = gap // self.width + STEPS[move][0], gap % self.width + STEPS[move][1]
        if self.solved or not (0 <= row < self.height and 0 <= column < self.width):
            return self
        return replace(self, tiles=_swapped(self.tiles, gap, row * self.width + column))

    def home(self, tile: int) -> int:
        """Return the cell where a tile belongs."""
        return tile - 1 if tile else len(self.tiles) - 1


def _swapped(tiles: bytes, a: int, b: int) -> bytes:
    changed = bytearray(tiles)
    changed[a], changed[b] = changed[b], changed[a]
    return bytes(changed)


@cache
def ordered(height: int, width: int) -> bytes:
    """Return the tiles of the solved puzzle."""
    return bytes((*range(1, height * width), GAP))


def shortest(puzzle: Puzzle) -> list[str]:
    """Return a shortest solution, by A* with the sum of the tiles' distances to their homes; [] if it is solved, cannot
    be solved, or is not within MAX_NODES positions."""
    goal, width = ordered(puzzle.height, puzzle.width), puzzle.width
    if puzzle.tiles == goal or not can_be_solved(puzzle):
        return []
    start = puzzle.tiles
    came: dict[bytes, tuple[bytes, str]] = {}
    best = {start: 0}
    heap = [(distance(puzzle), 0, start)]
    for _ in range(MAX_NODES):
        bound, negative, tiles = heapq.heappop(heap)
        cost = -negative
        if cost > best[tiles]:
            continue
        if tiles == goal:
            moves = []
            while tiles != start:
                tiles, move = came[tiles]
                moves.append(move)
            return moves[::-1]
        now = Puzzle(puzzle.height, width, tiles)
        gap = now.gap
        for move in MOVES:
            after = now.moved(move)
            if after is now or best.get(after.tiles, cost + 2) <= cost + 1:
                continue
            tile, to = after.tiles[gap], after.gap
            nearer = steps_between(gap, tile - 1, width) - steps_between(to, tile - 1, width)
            best[after.tiles] = cost + 1
            came[after.tiles] = (tiles, move)
            heapq.heappush(heap, (bound + 1 + nearer, -(cost + 1), after.tiles))
    return []


def distance(puzzle: Puzzle) -> int:
    """Return the sum of the tiles' distances to their homes, in steps."""
    placed = enumerate(puzzle.tiles)
    return sum(steps_between(cell, puzzle.home(tile), puzzle.width) for cell, tile in placed if tile)


def steps_between(a: int, b: int, width: int) -> int:
    return abs(a // width - b // width) + abs(a % width - b % width)


def can_be_solved(puzzle: Puzzle) -> bool:
    """Tell whether a puzzle can be solved: whether as many swaps order the tiles, modulo 2, as steps bring the gap
    home."""
    tiles = [tile or len(puzzle.tiles) for tile in puzzle.tiles]
    swaps = sum(a > b for number, b in enumerate(tiles) for a in tiles[:number])
    return swaps % 2 == steps_between(puzzle.gap, len(tiles) - 1, puzzle.width) % 2


@dataclass(frozen=True, slots=True)
class PuzzleSpec:
    """How random puzzles are drawn: from the solved one by `scramble` moves of the gap, none of which takes the last
    one back. Of several sizes or numbers each puzzle draws one."""

    sizes: tuple[tuple[int, int], ...] = ((3, 3),)
    scramble: tuple[int, ...] = (6,)
    min_solution: int = 1
    max_solution: int = 1_000_000
    split: str = ""  # "", "train" or "heldout"

    def __post_init__(self) -> None:
        for height, width in self.sizes:
            if min(height, width) < 2 or height * width > MAX_CELLS:
                raise ValueError(f"grid_size {height}x{width}: use 2x2 at least and {MAX_CELLS} cells at most")
        if not self.scramble or min(self.scramble) < 1:
            raise ValueError(f"scramble is {list(self.scramble)}: use at least 1")


def make_puzzle(seed: int | str, spec: PuzzleSpec) -> Puzzle:
    """Return the puzzle of `seed`; the same on every machine. Raise ValueError if none of MAX_TRIES puzzles fits
    `spec`."""
    rng = random.Random(seed)
    for _ in range(MAX_TRIES):
        height, width = spec.sizes[rng.randrange(len(spec.sizes))]
        scramble = spec.scramble[rng.randrange(len(spec.scramble))]
        puzzle = draw_puzzle(rng, height, width, scramble)
        if puzzle.solved or spec.split not in ("", split_of_puzzle(puzzle)):
            continue
        is_free = spec.min_solution <= 1 and spec.max_solution >= scramble  # of a search
        if is_free or spec.min_solution <= (len(shortest(puzzle)) or MAX_NODES) <= spec.max_solution:
            return puzzle
        if scramble < spec.min_solution and max(spec.scramble) < spec.min_solution:
            break  # a solution is never longer than the scramble
    raise ValueError(f"no puzzle found for {spec}: relax size, scramble or solution length")


def draw_puzzle(rng: random.Random, height: int, width: int, scramble: int) -> Puzzle:
    """Return the solved puzzle after `scramble` random moves of the gap."""
    tiles, gap, last = ordered(height, width), height * width - 1, ""
    for _ in range(scramble):
        row, column = divmod(gap, width)
        ways = [
            (move, (row + down) * width + column + right)
            for move, (down, right) in STEPS.items()
            if 0 <= row + down < height and 0 <= column + right < width and move != OPPOSITE.get(last)
        ]
        last, to = ways[rng.randrange(len(ways))]
        tiles, gap = _swapped(tiles, gap, to), to
    return Puzzle(height, width, tiles)


def split_of_puzzle(puzzle: Puzzle) -> str:
    """Return the split of a puzzle: "heldout" for one in eight, else "train". It depends on the puzzle alone."""
    return split_of_bytes(bytes((puzzle.height, puzzle.width)) + puzzle.tiles)


_GROUND, _EDGE, _INK = 0, 1, 2
_WOODS = ((244, 205, 140), (180, 220, 160), (160, 200, 240), (240, 170, 160), (210, 180, 235), (250, 230, 130))
_COLOURS = ((60, 50, 45), (120, 85, 50), (30, 25, 20), *_WOODS)


def _draw(draw: ImageDraw.ImageDraw, code: int, p: int) -> None:
    if code == GAP:
        return
    framed(draw, p, 3 + code % len(_WOODS), _EDGE, max(1, p // 32))
    font, text = _font(max(8, p // 2)), str(code)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    draw.text(((p - right - left) / 2, (p - bottom - top) / 2), text, fill=_INK, font=font)


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


SYMBOLS = tuple("_" if tile == GAP else str(tile) for tile in range(MAX_CELLS))
TILES = TileSet(_COLOURS, SYMBOLS, _draw)
