"""The best play on slippery ice: value iteration over the moves that are left."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from envs.boards.board import MOVES
from envs.boards.lake import ICE, Lake, outcomes


@lru_cache(256)
def win_chances(cells: Lake, success_rate: float, steps: int) -> tuple[tuple[float, ...], ...]:
    """Return, for each number of moves left from 0 to `steps`, each cell's probability of reaching the goal with the
    best play. The player's place in `cells` does not matter."""
    lakes = [replace(cells, player=cell) for cell in range(len(cells.cells))]
    chances = [tuple(float(lake.solved) for lake in lakes)]
    for _ in range(steps):
        left = chances[-1]
        chances.append(
            tuple(
                max(_chance(lake, move, success_rate, left) for move in MOVES)
                if lake.cells[cell] == ICE
                else left[cell]
                for cell, lake in enumerate(lakes)
            )
        )
    return tuple(chances)


def win_chance(lake: Lake, success_rate: float, steps: int) -> float:
    """Return the probability of reaching the goal within `steps` moves with the best play."""
    return win_chances(replace(lake, player=0), success_rate, steps)[steps][lake.player]


def best_move(lake: Lake, success_rate: float, steps: int) -> str:
    """Return the first move of the best play with `steps` moves left, at least 1."""
    left = win_chances(replace(lake, player=0), success_rate, steps)[steps - 1]
    return max(MOVES, key=lambda move: _chance(lake, move, success_rate, left))


def _chance(lake: Lake, move: str, success_rate: float, left: tuple[float, ...]) -> float:
    return sum(chance * left[after.player] for chance, after in outcomes(lake, move, success_rate))
