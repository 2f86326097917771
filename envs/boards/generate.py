"""Sokoban boards: one frozen record, its text forms, its symmetries, and its random generation.

Cells are numbered row by row: cell = row * width + column.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = "#_O√XPS"
XSB = {"#": WALL, " ": FLOOR, "-": FLOOR, "_": FLOOR, ".": TARGET, "*": BOX_ON_TARGET, "$": BOX, "@": PLAYER,
       "+": PLAYER_ON_TARGET}  # fmt: skip
MOVES = ("up", "down", "left", "right")
MAX_TRIES = 20_000


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
        """What is seen in each cell, as codes 0 to 6."""
        shown = bytearray(self.cells)
        for box in self.boxes:
            shown[box] = BOX_ON_TARGET if self.cells[box] == TARGET else BOX
        shown[self.player] = PLAYER_ON_TARGET if self.cells[self.player] == TARGET else PLAYER
        return bytes(shown)

    def text(self) -> str:
        """The board in symbols, cells padded with spaces and joined by tabs."""
        return text_of(self.codes(), self.width)

    def offset(self, move: str) -> int:
        return {"up": -self.width, "down": self.width, "left": -1, "right": 1}[move]

    def moved(self, move: str) -> Board:
        """The board after one move; itself where the move is blocked."""
        step = self.offset(move)
        to, behind = self.player + step, self.player + 2 * step
        if self.cells[to] == WALL:
            return self
        if to not in self.boxes:
            return replace(self, player=to)
        if self.cells[behind] == WALL or behind in self.boxes:
            return self
        boxes = tuple(sorted(behind if box == to else box for box in self.boxes))
        return replace(self, boxes=boxes, player=to)

    def env_config(self) -> dict[str, Any]:
        """The board in the fields of the public dataset (rows of codes, [row, column] pairs)."""
        width = self.width
        return {
            "grid_size": [self.height, width],
            "num_boxes": len(self.boxes),
            "initial_base_grid": [list(self.cells[row * width : (row + 1) * width]) for row in range(self.height)],
            "initial_boxes": [list(divmod(box, width)) for box in self.boxes],
            "initial_player": list(divmod(self.player, width)),
        }


def text_of(codes: bytes, width: int) -> str:
    rows = [codes[start : start + width] for start in range(0, len(codes), width)]
    return "\n".join("\t".join(f" {SYMBOLS[code]} " for code in row) for row in rows)


def board_of(height: int, width: int, codes: bytes) -> Board:
    """A board from codes 0 to 6. ValueError unless it is closed, with one player and as many boxes as targets."""
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
    """A board from `initial_base_grid`, `initial_boxes` and `initial_player` (rows of codes, [row, column] pairs)."""
    grid = [[int(code) for code in row] for row in config["initial_base_grid"]]
    height, width = len(grid), len(grid[0])
    if any(len(row) != width for row in grid):
        raise ValueError("initial_base_grid has rows of different lengths")
    base = bytes(code if code in (WALL, FLOOR, TARGET) else FLOOR for row in grid for code in row)
    boxes = tuple(sorted(int(row) * width + int(column) for row, column in config["initial_boxes"]))
    row, column = config["initial_player"]
    return checked(Board(height, width, base, boxes, int(row) * width + int(column)))


def checked(board: Board) -> Board:
    """`board` itself; ValueError where it is no Sokoban board."""
    size = board.height * board.width
    if not all(0 <= cell < size and board.cells[cell] != WALL for cell in (*board.boxes, board.player)):
        raise ValueError("a box or the player stands in a wall or outside the board")
    if board.player in board.boxes or len(set(board.boxes)) != len(board.boxes):
        raise ValueError("two things stand in the same cell of the board")
    if not board.boxes or len(board.targets) < len(board.boxes):
        raise ValueError(
            f"a board needs a target for each box; it has {len(board.targets)} for {len(board.boxes)} boxes"
        )
    if not _closed(board):
        raise ValueError("the board is not closed by walls around the player")
    return board


def _closed(board: Board) -> bool:
    last_row, last_column = board.height - 1, board.width - 1
    seen, stack = {board.player}, [board.player]
    while stack:
        cell = stack.pop()
        row, column = divmod(cell, board.width)
        if row in (0, last_row) or column in (0, last_column):
            return False
        for step in (-board.width, board.width, -1, 1):
            if board.cells[cell + step] != WALL and cell + step not in seen:
                seen.add(cell + step)
                stack.append(cell + step)
    return True


def canonical(board: Board) -> bytes:
    """The same bytes for a board and all its rotations and mirror images; different for any other board."""
    codes, height, width = board.codes(), board.height, board.width
    forms = []
    for _ in range(2):
        for turned in (codes, codes[::-1]):
            rows = [turned[start : start + width] for start in range(0, len(turned), width)]
            forms.append(bytes((height, width)) + turned)
            forms.append(bytes((height, width)) + b"".join(row[::-1] for row in rows))
        rows = [codes[start : start + width] for start in range(0, len(codes), width)]
        codes = b"".join(bytes(column) for column in zip(*rows, strict=True))
        height, width = width, height
    return min(forms)


def split_of(board: Board) -> str:
    """ "heldout" for one class of symmetric boards in eight, "train" for the others: a property of the board alone."""
    return "heldout" if hashlib.sha256(canonical(board)).digest()[0] < 32 else "train"


@dataclass(frozen=True, slots=True)
class BoardSpec:
    """What random boards look like. Several sizes or box numbers: each board draws one of them."""

    sizes: tuple[tuple[int, int], ...] = ((6, 6),)
    num_boxes: tuple[int, ...] = (1,)
    wall_chance: float = 0.05
    min_solution: int = 1  # moves of the shortest known solution
    max_solution: int = 1_000_000
    split: str = ""  # "", "train" or "heldout"

    def __post_init__(self) -> None:
        if self.split not in ("", "train", "heldout"):
            raise ValueError(f"split is {self.split!r}: use train, heldout or leave it out")
        if not 0 <= self.wall_chance < 1:
            raise ValueError(f"wall_chance is {self.wall_chance}: use a number from 0 to below 1")
        for height, width in self.sizes:
            room = (height - 2) * (width - 2)
            if min(height, width) < 3 or max(height, width) > 50 or room < 2 * max(self.num_boxes) + 1:
                raise ValueError(f"grid_size {height}x{width} has no room for {max(self.num_boxes)} boxes: enlarge it")
        if min(self.num_boxes) < 1:
            raise ValueError(f"num_boxes is {min(self.num_boxes)}: use at least 1")


def make_board(seed: int | str, spec: BoardSpec) -> Board:
    """The solvable board of `seed`; the same on every machine. ValueError if `spec` admits none in MAX_TRIES tries."""
    from envs.boards.solver import solve

    rng = random.Random(seed)
    for _ in range(MAX_TRIES):
        height, width = spec.sizes[rng.randrange(len(spec.sizes))]
        board = _draw(rng, height, width, spec.num_boxes[rng.randrange(len(spec.num_boxes))], spec.wall_chance)
        if board is None or board.solved or (spec.split and split_of(board) != spec.split):
            continue
        moves = solve(board, max_nodes=3_000)
        if moves is not None and spec.min_solution <= len(moves) <= spec.max_solution:
            return board
    raise ValueError(f"no board found in {MAX_TRIES} tries for {spec}: relax size, boxes or solution length")


def _draw(rng: random.Random, height: int, width: int, num_boxes: int, wall_chance: float) -> Board | None:
    cells = bytearray(height * width)
    inside = [row * width + column for row in range(1, height - 1) for column in range(1, width - 1)]
    free = []
    for cell in inside:
        if rng.random() >= wall_chance:
            cells[cell] = FLOOR
            free.append(cell)
    if len(free) < 2 * num_boxes + 1:
        return None
    chosen = rng.sample(free, 2 * num_boxes + 1)
    boxes = chosen[num_boxes : 2 * num_boxes]
    targets = chosen[:num_boxes]
    if num_boxes > 1:  # a box may also start on a target
        targets = [boxes[i] if i and rng.random() < 0.1 else target for i, target in enumerate(targets)]
    for target in targets:
        cells[target] = TARGET
    return Board(height, width, bytes(cells), tuple(sorted(boxes)), chosen[-1])
