"""Mazes with a key and a door: one frozen record, its moves, and random mazes that can be solved.

Cells are numbered row by row: cell = row * width + column. A maze has no wall around it: a move off its edge leads
nowhere. The door is passed with the key, which is picked up by walking onto it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from PIL import ImageDraw

from envs.boards.board import STEPS, split_of
from envs.boards.tile_sets import TileSet, disc, framed
from envs.boards.walks import shortest_way

WALL, FLOOR, GOAL, KEY, DOOR, PLAYER, PLAYER_WITH_KEY, PLAYER_AT_GOAL = range(8)
SYMBOLS = "#_GKDPH√"
MAX_TRIES = 20_000


@dataclass(frozen=True)
class MazeBoard:
    """A position. `cells` holds WALL, FLOOR, GOAL, KEY or DOOR for each cell, the key also when it has been taken."""

    height: int
    width: int
    cells: bytes
    player: int
    has_key: bool = False

    @property
    def goal(self) -> int:
        return self.cells.index(GOAL)

    @property
    def key(self) -> int:
        return self.cells.index(KEY)

    @property
    def door(self) -> int:
        return self.cells.index(DOOR)

    @property
    def solved(self) -> bool:
        return self.cells[self.player] == GOAL

    @property
    def over(self) -> bool:
        return self.solved

    def codes(self) -> bytes:
        """Return the code, 0 to 7, of what is visible in each cell."""
        codes = bytearray(self.cells)
        if self.has_key:
            codes[self.key] = FLOOR
        codes[self.player] = PLAYER_AT_GOAL if self.solved else PLAYER_WITH_KEY if self.has_key else PLAYER
        return bytes(codes)

    def moved(self, move: str) -> MazeBoard:
        """Return the maze after one move; the maze itself if the move is blocked, and at the goal."""
        to = self.beside(self.player, move)
        if self.solved or to is None or self.cells[to] == WALL or (self.cells[to] == DOOR and not self.has_key):
            return self
        return replace(self, player=to, has_key=self.has_key or self.cells[to] == KEY)

    def beside(self, cell: int, move: str) -> int | None:
        """Return the cell beside `cell`; None at the edge."""
        row, column = cell // self.width + STEPS[move][0], cell % self.width + STEPS[move][1]
        return row * self.width + column if 0 <= row < self.height and 0 <= column < self.width else None


@dataclass(frozen=True, slots=True)
class MazeSpec:
    """How random mazes are drawn. Of several sizes or numbers of walls each maze draws one."""

    sizes: tuple[tuple[int, int], ...] = ((5, 5),)
    walls: tuple[int, ...] = (2,)
    min_solution: int = 1
    max_solution: int = 1_000_000
    split: str = ""  # "", "train" or "heldout"

    def __post_init__(self) -> None:
        for height, width in self.sizes:
            if not (height % 2 and width % 2 and min(height, width) >= 3 and max(height, width) <= 49):
                raise ValueError(f"grid_size {height}x{width}: use odd numbers from 3 to 49")
        if not self.walls or min(self.walls) < 1:
            raise ValueError(f"walls is {list(self.walls)}: use at least 1, for the door is in the first")


def make_maze(seed: int | str, spec: MazeSpec) -> MazeBoard:
    """Return the maze of `seed`; the same on every machine. Raise ValueError if none of MAX_TRIES mazes fits `spec`."""
    rng = random.Random(seed)
    for _ in range(MAX_TRIES):
        height, width = spec.sizes[rng.randrange(len(spec.sizes))]
        maze = draw_maze(rng, height, width, spec.walls[rng.randrange(len(spec.walls))])
        if not spec.min_solution <= len(shortest_way(maze)) <= spec.max_solution:
            continue
        if spec.split in ("", split_of(maze)):
            return maze
    raise ValueError(f"no maze found in {MAX_TRIES} tries for {spec}: relax size, walls or solution length")


def draw_maze(rng: random.Random, height: int, width: int, walls: int) -> MazeBoard:
    """Return a random maze of at most `walls` walls, which can be solved. Rooms are divided again and again by a wall
    with one gap (walls stand in odd rows and columns, gaps in even ones, so that no wall closes another's gap). The gap
    of the first wall is the door; player and key are on one side of it, the goal is on the other."""
    cells = bytearray([FLOOR] * (height * width))
    rooms = [(0, 0, height, width)]
    sides: list[list[int]] = []
    for number in range(walls):
        wide = [room for room in rooms if max(room[2:]) >= 3]
        if not wide:
            break
        top, left, rows, columns = room = wide[rng.randrange(len(wide))]
        rooms.remove(room)
        across = rows >= 3 and (columns < 3 or rng.random() < rows / (rows + columns))
        if across:
            at, gap = 2 * rng.randrange(rows // 2) + 1, 2 * rng.randrange(columns // 2 + 1)
            line = [(top + at) * width + left + column for column in range(columns)]
            halves = [(top, left, at, columns), (top + at + 1, left, rows - at - 1, columns)]
        else:
            at, gap = 2 * rng.randrange(columns // 2) + 1, 2 * rng.randrange(rows // 2 + 1)
            line = [(top + row) * width + left + at for row in range(rows)]
            halves = [(top, left, rows, at), (top, left + at + 1, rows, columns - at - 1)]
        rooms += halves
        for place, cell in enumerate(line):
            if place != gap:
                cells[cell] = WALL
            elif not number:
                cells[cell] = DOOR
        if not number:
            sides = [[r * width + c for r in range(t, t + h) for c in range(s, s + w)] for t, s, h, w in halves]
    near, far = ([cell for cell in side if cells[cell] == FLOOR] for side in rng.sample(sides, 2))
    if len(near) < 2:  # a side of one cell has no room for player and key
        near, far = far, near
    player, key = rng.sample(near, 2)
    cells[key], cells[rng.choice(far)] = KEY, GOAL
    return MazeBoard(height, width, bytes(cells), player)


_FLOOR, _WALL, _MORTAR, _RED, _POLE, _GOLD, _EDGE, _WOOD, _GREEN, _DARK = range(10)
_COLOURS = ((236, 232, 220), (96, 98, 110), (70, 72, 84), (220, 40, 40), (90, 60, 30), (245, 195, 40), (150, 100, 20),
            (140, 90, 50), (60, 200, 80), (20, 90, 35))  # fmt: skip


def _draw(draw: ImageDraw.ImageDraw, code: int, p: int) -> None:
    line = max(1, p // 16)
    if code == WALL:
        framed(draw, p, _WALL, _MORTAR, 0)
    if code in (GOAL, PLAYER_AT_GOAL):
        draw.rectangle((p // 3, p // 8, p // 3 + line, p - p // 8), fill=_POLE)
        draw.polygon(((p // 3 + line, p // 8), (p - p // 8, p // 4 + line), (p // 3 + line, p // 2)), fill=_RED)
    if code == DOOR:
        framed(draw, p, _WOOD, _POLE, 0)
        disc(draw, p, _GOLD, _EDGE, 3 * p // 8)
    if code in (PLAYER, PLAYER_WITH_KEY, PLAYER_AT_GOAL):
        disc(draw, p, _GREEN, _DARK, p // 3 if code == PLAYER_AT_GOAL else p // 8)
    if code in (KEY, PLAYER_WITH_KEY):
        draw.ellipse((p // 4, p // 4, p // 2, p // 2), outline=_EDGE, fill=_GOLD, width=line)
        draw.line((p // 2 - line, p // 2 - line, 3 * p // 4, 3 * p // 4), fill=_GOLD, width=2 * line)


TILES = TileSet(_COLOURS, SYMBOLS, _draw)
