"""Describes a sliding puzzle in words, as the small models write it in <think>.

    1 2 3 4 5 . 7 8 6 : 3 +1+0 - 5 +0+0 6 +0-1

The tiles row by row, a point for the gap; then the tile above the gap, below it, to its left and to its right, each
with how many rows down and columns to the right its home lies, and `-` where there is none.
"""

from __future__ import annotations

from envs.boards.board import MOVES
from envs.boards.place_words import offset
from envs.boards.puzzle import Puzzle


def reading(puzzle: Puzzle) -> str:
    """Return the text of <think>."""
    tiles = " ".join(str(tile) if tile else "." for tile in puzzle.tiles)
    return f"{tiles} : {' '.join(_beside(puzzle, move) for move in MOVES)}"


def _beside(puzzle: Puzzle, move: str) -> str:
    after = puzzle.moved(move)
    if after is puzzle:
        return "-"
    tile = puzzle.tiles[after.gap]
    return f"{tile} {offset(puzzle.home(tile), after.gap, puzzle.width)}"


def puzzle_words(cells: int) -> tuple[str, ...]:
    """Return the words beside those for places, for building a tokenizer."""
    return (".", ":", "-", *(str(tile) for tile in range(1, cells)))
