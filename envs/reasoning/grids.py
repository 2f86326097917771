"""Reads a board that is written in symbols and compares it with the real one."""

from __future__ import annotations

from collections.abc import Sequence

from envs.reasoning.board_facts import BoardFacts, f1

Mark = tuple[int, int, str]  # row, column, symbol


def grid_score(text: str, facts: BoardFacts) -> float:
    """Return the F1 of the symbols that mark things, times that of the walls, 0 to 1; 0 for a grid of another size.
    Rows are lines; spaces and tabs between symbols, and lines without symbols, say nothing."""
    rows = tuple(row for line in text.splitlines() if (row := "".join(line.split())))
    if [len(row) for row in rows] != [len(row) for row in facts.rows]:
        return 0.0
    said, true = _marks(rows), _marks(facts.rows)
    return f1(_things(said, facts), _things(true, facts)) * f1(_walls(said, facts), _walls(true, facts))


def _marks(rows: Sequence[str]) -> set[Mark]:
    return {(number, column, symbol) for number, row in enumerate(rows) for column, symbol in enumerate(row)}


def _things(marks: set[Mark], facts: BoardFacts) -> set[Mark]:
    return {mark for mark in marks if mark[2] not in facts.floor + facts.wall}


def _walls(marks: set[Mark], facts: BoardFacts) -> set[Mark]:
    return {mark for mark in marks if mark[2] == facts.wall}
