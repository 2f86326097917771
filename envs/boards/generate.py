"""Random Sokoban boards that can be solved."""

from __future__ import annotations

import random
from dataclasses import dataclass

from envs.boards.board import FLOOR, TARGET, Board, split_of
from envs.boards.reverse_play import reverse_played
from envs.boards.solver import solve

MAX_TRIES = 20_000


@dataclass(frozen=True, slots=True)
class BoardSpec:
    """How random boards are drawn. Of several sizes or box numbers each board draws one."""

    sizes: tuple[tuple[int, int], ...] = ((6, 6),)
    num_boxes: tuple[int, ...] = (1,)
    wall_chance: float = 0.05
    min_solution: int = 1  # moves of the shortest known solution
    max_solution: int = 1_000_000
    split: str = ""  # "", "train" or "heldout"
    played_backwards: bool = False  # as gym-sokoban draws them; without wall_chance

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
    """Return the solvable board of `seed`; the same on every machine. Raise ValueError if none of MAX_TRIES boards fits
    `spec`."""
    rng = random.Random(seed)
    for _ in range(MAX_TRIES):
        height, width = spec.sizes[rng.randrange(len(spec.sizes))]
        boxes = spec.num_boxes[rng.randrange(len(spec.num_boxes))]
        if spec.played_backwards:
            board = reverse_played(rng, height, width, boxes)
        else:
            board = draw_board(rng, height, width, boxes, spec.wall_chance)
        if board is None or board.solved or (spec.split and split_of(board) != spec.split):
            continue
        moves = solve(board, max_nodes=3_000)
        if moves is not None and spec.min_solution <= len(moves) <= spec.max_solution:
            return board
    raise ValueError(f"no board found in {MAX_TRIES} tries for {spec}: relax size, boxes or solution length")


def draw_board(rng: random.Random, height: int, width: int, num_boxes: int, wall_chance: float) -> Board | None:
    """Return a random board, which may have no solution; None if the walls leave too little room."""
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
