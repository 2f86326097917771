"""Words for places on a board, which all games' descriptions share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from envs.boards.board import MOVES


def named(cell: int, width: int) -> str:
    """Return the name of a cell: its row and column."""
    return f"{cell // width}{cell % width}"


def offset(cell: int, seen_from: int, width: int) -> str:
    """Return how many rows down and columns to the right a cell lies."""
    return f"{cell // width - seen_from // width:+d}{cell % width - seen_from % width:+d}"


def placed(cell: int, seen_from: int, width: int) -> str:
    """Return a cell's name and where it lies."""
    return f"{named(cell, width)} {offset(cell, seen_from, width)}"


def barred(moves: Iterable[str]) -> str:
    """Return one word for a set of moves that are blocked or lose."""
    return "!" + "".join(move[0] for move in moves)


def place_words(height: int, width: int) -> tuple[str, ...]:
    """Return all names, offsets and sets of moves of boards of a size, for building a tokenizer."""
    down, right = range(1 - height, height), range(1 - width, width)
    return (
        *(f"{row}{column}" for row in range(height) for column in range(width)),
        *(f"{rows:+d}{columns:+d}" for rows in down for columns in right),
        *(barred(moves) for count in range(5) for moves in combinations(MOVES, count)),
    )
