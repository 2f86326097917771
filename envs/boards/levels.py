"""Sokoban level files in the XSB notation, as the Boxoban collection uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from envs.boards.board import FLOOR, WALL, XSB, Board, board_of, edge, reached

_ROW = re.compile(r"^[#@+$*.\-_ ]+$")


def iter_levels(path: str | Path) -> Iterator[Board | ValueError]:
    """Yield each level of a file in order: its board, or the error if it is invalid."""
    for rows in _blocks(Path(path).read_text(encoding="utf-8", errors="replace")):
        try:
            yield parse_level(rows)
        except ValueError as error:
            yield error


def parse_level(rows: list[str]) -> Board:
    """Return one level from its rows. Short rows are filled with walls, and so is the floor outside the outer wall."""
    width = max(len(row) for row in rows)
    codes = bytes(code for row in rows for code in (*(XSB[symbol] for symbol in row), *[WALL] * (width - len(row))))
    return board_of(len(rows), width, _outside_filled(codes, width))


def _blocks(text: str) -> list[list[str]]:
    """Return the blocks of lines that look like rows of a level; titles, comments and empty lines separate them."""
    runs = groupby(text.splitlines(), lambda line: bool(_ROW.match(line) and "#" in line))
    return [[line.rstrip() for line in lines] for is_level, lines in runs if is_level]


def _outside_filled(codes: bytes, width: int) -> bytes:
    """Turn the floor outside the outer wall of `codes` into wall; return `codes` unchanged if the level is not
    closed."""
    outside = reached(codes, width, edge(len(codes) // width, width))
    if any(codes[cell] != FLOOR for cell in outside):
        return codes
    return bytes(WALL if cell in outside else code for cell, code in enumerate(codes))
