"""Sokoban boards: one frozen record, its text forms and its symmetries.

Cells are numbered row by row: cell = row * width + column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from envs.boards.tile_sets import Grid
from envs.splits import split_of_bytes

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = "#_O√XPS"
XSB = {"#": WALL, " ": FLOOR, "-": FLOOR, "_": FLOOR, ".": TARGET, "*": BOX_ON_TARGET, "$": BOX, "@": PLAYER,
       "+": PLAYER_ON_TARGET}  # fmt: skip
MOVES = ("up", "down", "left", "right")
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # rows down, columns to the right


@dataclass(frozen=True)
class Board:
    """A position. `cells` holds WALL, FLOOR or TARGET for each cell; `boxes` are sorted cell numbers."""

    height: int
    width: int
    cells: bytes
    boxes: tuple[int, ...]
    player: int

    @cached_property
    def targets(self) -> tuple[int, ...]:
        return tuple(cell for cell, code in enumerate(self.cells) if code == TARGET)

    @property
    def solved(self) -> bool:
        return all(self.cells[box] == TARGET for box in self.boxes)

    def codes(self) -> bytes:
        """Return the code, 0 to 6, of what is visible in each cell."""
        codes = bytearray(self.cells)
        for box in self.boxes:
            codes[box] = BOX_ON_TARGET if self.cells[box] == TARGET else BOX
        codes[self.player] = PLAYER_ON_TARGET if self.cells[self.player] == TARGET else PLAYER
        return bytes(codes)

    def text(self) -> str:
        """Return the board in symbols, cells padded with spaces and joined by tabs."""
        codes = self.codes()
        rows = [codes[start : start + self.width] for start in range(0, len(codes), self.width)]
        return "\n".join("\t".join(f" {SYMBOLS[code]} " for code in row) for row in rows)

    def moved(self, move: str) -> Board:
        """Return the board after one move; the board itself if the move is blocked."""
        step = (-self.width, self.width, -1, 1)[MOVES.index(move)]
        to, behind = self.player + step, self.player + 2 * step
        if self.cells[to] == WALL:
            return self
        if to not in self.boxes:
            return Board(self.height, self.width, self.cells, self.boxes, to)
        if self.cells[behind] == WALL or behind in self.boxes:
            return self
        boxes = tuple(sorted(behind if box == to else box for box in self.boxes))
        return Board(self.height, self.width, self.cells, boxes, to)

    def env_config(self) -> dict[str, Any]:
        """Return the board in the fields of the public dataset (rows of codes, [row, column] pairs)."""
        width = self.width
        return {
            "grid_size": [self.height, width],
            "num_boxes": len(self.boxes),
            "initial_base_grid": [list(self.cells[row * width : (row + 1) * width]) for row in range(self.height)],
            "initial_boxes": [list(divmod(box, width)) for box in self.boxes],
            "initial_player": list(divmod(self.player, width)),
        }


def board_of(height: int, width: int, codes: bytes) -> Board:
    """Return a board from codes 0 to 6. Raise ValueError unless it is closed, with one player and a target for each
    box."""
    players = [cell for cell, code in enumerate(codes) if code in (PLAYER, PLAYER_ON_TARGET)]
    if len(players) != 1:
        raise ValueError(f"a board needs exactly one player, found {len(players)}")
    boxes = tuple(cell for cell, code in enumerate(codes) if code in (BOX, BOX_ON_TARGET))
    base = bytes(
        TARGET if code in (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET) else WALL if code == WALL else FLOOR
        for code in codes
    )
    return checked(Board(height, width, base, boxes, players[0]))


def board_from_config(config: dict[str, Any]) -> Board:
    """Return a board from `initial_base_grid`, `initial_boxes` and `initial_player` (rows of codes, [row, column]
    pairs)."""
    grid = [[int(code) for code in row] for row in config["initial_base_grid"]]
    height, width = len(grid), len(grid[0])
    if any(len(row) != width for row in grid):
        raise ValueError("initial_base_grid has rows of different lengths")
    base = bytes(code if code in (WALL, FLOOR, TARGET) else FLOOR for row in grid for code in row)
    boxes = tuple(sorted(int(row) * width + int(column) for row, column in config["initial_boxes"]))
    row, column = config["initial_player"]
    return checked(Board(height, width, base, boxes, int(row) * width + int(column)))


def checked(board: Board) -> Board:
    """Return `board` itself. Raise ValueError if it is not a valid Sokoban board."""
    size = board.height * board.width
    if not all(0 <= cell < size and board.cells[cell] != WALL for cell in (*board.boxes, board.player)):
        raise ValueError("a box or the player stands in a wall or outside the board")
    if board.player in board.boxes or len(set(board.boxes)) != len(board.boxes):
        raise ValueError("two things stand in the same cell of the board")
    if not board.boxes or len(board.targets) < len(board.boxes):
        raise ValueError(
            f"a board needs a target for each box; it has {len(board.targets)} for {len(board.boxes)} boxes"
        )
    if reached(board.cells, board.width, [board.player]) & edge(board.height, board.width):
        raise ValueError("the board is not closed by walls around the player")
    return board


def edge(height: int, width: int) -> set[int]:
    """Return the outermost cells of a board."""
    return {
        cell for cell in range(height * width) if cell // width in (0, height - 1) or cell % width in (0, width - 1)
    }


def reached(codes: bytes, width: int, starts: Iterable[int]) -> set[int]:
    """Return the cells without a wall that can be walked to from `starts`."""
    seen: set[int] = set()
    stack, last_row = list(starts), len(codes) // width - 1
    while stack:
        cell = stack.pop()
        if cell in seen or codes[cell] == WALL:
            continue
        seen.add(cell)
        row, column = divmod(cell, width)
        near = ((-width, row > 0), (width, row < last_row), (-1, column > 0), (1, column < width - 1))
        stack += [cell + step for step, inside in near if inside]
    return seen


def canonical(board: Grid) -> bytes:
    """Return the same bytes for a board and all its rotations and mirror images; different for any other board."""
    grid = np.frombuffer(board.codes(), np.uint8).reshape(board.height, board.width)
    forms = [form for each in (grid, grid.T) for form in (each, each[::-1], each[:, ::-1], each[::-1, ::-1])]
    return min(bytes(form.shape) + form.tobytes() for form in forms)


def split_of(board: Grid) -> str:
    """Return the split that a board belongs to: "heldout" for one class of symmetric boards in eight, else "train".
    It depends on the board alone."""
    return split_of_bytes(canonical(board))
