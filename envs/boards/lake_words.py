"""Describes a lake in words, as the small models write it in <think>.

    21 33 +1+2 02 -2+1 30 +1-1 !lu

The player's cell; the goal's cell, and how many rows down and columns to the right of the player it lies; the same of
each hole; and which moves lead into a hole or off the edge.
"""

from __future__ import annotations

from envs.boards.board import MOVES
from envs.boards.lake import HOLE, Lake
from envs.boards.place_words import barred, named, placed


def reading(lake: Lake) -> str:
    """Return the text of <think>."""
    cells = " ".join(placed(cell, lake.player, lake.width) for cell in (lake.goal, *lake.holes))
    return f"{named(lake.player, lake.width)} {cells} {barred(move for move in MOVES if _is_bad(lake, move))}"


def _is_bad(lake: Lake, move: str) -> bool:
    after = lake.moved(move)
    return after is lake or after.cells[after.player] == HOLE
