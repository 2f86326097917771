"""Random boards made by playing backwards, as gym-sokoban makes them: the boards that published results on visual
Sokoban are measured on.

A room is carved by a random walk. The boxes start on their targets and are pulled away; of all positions that a
depth-first search reaches, the one whose boxes are farthest from their targets, times the number of changes between
boxes, is the board. Every board can be solved.
Source: https://github.com/mpSchrader/gym-sokoban, `room_utils.py`, described there and in Weber et al. 2017.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from envs.boards.board import FLOOR, TARGET, WALL, Board

TURN_CHANCE = 0.35  # of the walk, at each step
DEPTH = 300  # of the search
POSITIONS = 300_000  # that the search looks at, at most
ROOMS = 4  # tried before a draw is given up
BRUSHES = (  # what the walk carves around it, as (row, column) offsets
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))


@dataclass(frozen=True, slots=True)
class _Pulled:
    """A position of the backward game: `boxes[i]` has been pulled from target i; `last` is the box pulled last."""

    boxes: tuple[int, ...]
    player: int
    changes: int = 0
    last: int = -1


def reverse_played(rng: random.Random, height: int, width: int, num_boxes: int) -> Board | None:
    """Return a board that can be solved; None if no room of a few had a position with all boxes off their targets."""
    for _ in range(ROOMS):
        cells = carved(rng, height, width)
        floor = [cell for cell, code in enumerate(cells) if code == FLOOR]
        if len(floor) <= num_boxes:
            continue
        player, *targets = rng.sample(floor, num_boxes + 1)
        position = farthest(bytes(cells), width, tuple(targets), player)
        if position is not None:
            for target in targets:
                cells[target] = TARGET
            return Board(height, width, bytes(cells), tuple(sorted(position.boxes)), position.player)
    return None


def carved(rng: random.Random, height: int, width: int) -> bytearray:
    """Return the cells of a room, FLOOR or WALL, carved by a walk of 1.7 steps for each row and column."""
    cells = bytearray([WALL]) * (height * width)
    down, right = rng.choice(STEPS)
    row, column = rng.randint(1, height - 1), rng.randint(1, width - 1)
    for _ in range(int(1.7 * (height + width))):
        if rng.random() < TURN_CHANCE:
            down, right = rng.choice(STEPS)
        row, column = min(max(row + down, 1), height - 2), min(max(column + right, 1), width - 2)
        for rows, columns in rng.choice(BRUSHES):
            if 0 < row + rows < height - 1 and 0 < column + columns < width - 1:
                cells[(row + rows) * width + column + columns] = FLOOR
    return cells


def farthest(cells: bytes, width: int, targets: tuple[int, ...], player: int) -> _Pulled | None:
    """Return the position of the best score that pulling the boxes from their targets leads to; None if none has all
    boxes off the targets and the player off them too."""
    best, most = None, 0
    seen: set[tuple[tuple[int, ...], int]] = set()
    stack = [(_Pulled(targets, player), 1)]
    while stack:
        position, depth = stack.pop()
        key = (tuple(sorted(position.boxes)), position.player)
        if depth >= DEPTH or len(seen) >= POSITIONS or key in seen:
            continue
        seen.add(key)
        score = position.changes * sum(map(partial(_distance, width), position.boxes, targets))
        if score > most and not {*position.boxes, position.player} & {*targets}:
            best, most = position, score
        following = [_after(cells, position, rows * width + columns, pull) for pull, (rows, columns) in _ACTIONS]
        stack += [(each, depth + 1) for each in reversed(following) if each is not None]
    return best


_ACTIONS = [(pull, step) for pull in (True, False) for step in STEPS]


def _after(cells: bytes, position: _Pulled, step: int, pull: bool) -> _Pulled | None:
    """Return the position after the player has walked one cell and, with `pull`, has pulled the box behind; None if it
    cannot walk."""
    to, behind = position.player + step, position.player - step
    if cells[to] == WALL or to in position.boxes:
        return None
    if not pull or behind not in position.boxes:
        return _Pulled(position.boxes, to, position.changes, position.last)
    index = position.boxes.index(behind)
    boxes = tuple(position.player if box == behind else box for box in position.boxes)
    return _Pulled(boxes, to, position.changes + (index != position.last), index)


def _distance(width: int, one: int, other: int) -> int:
    """Return the rows and columns between two cells."""
    return abs(one // width - other // width) + abs(one % width - other % width)
