"""Reads where things are said to be, relative to the player, and compares it with a board.

"The box is above and left of the player, and the target is below and same column of the player" claims two relations. A
claim is right if both its row and its column are: a fixed sentence is right for few boards. Claims of one kind of thing
are compared with all things of that kind, each thing once; the score is the mean over kinds of the F1 of right claims,
so that neither leaving things out nor claiming all possibilities pays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from envs.reasoning.board_facts import BoardFacts, Cell, f1

Relation = tuple[str, str]  # ("above" | "same row" | "below", "left" | "same column" | "right")
UNCLEAR: Relation = ("", "")  # a claim without a row or a column, or with two of one
_ROWS = {
    "above": r"above|up(?:wards?)?|north(?:ern)?|higher",
    "below": r"below|beneath|under(?:neath)?|down(?:wards?)?|south(?:ern)?|lower",
    "same row": r"same row",
}
_COLUMNS = {
    "left": r"left|west(?:ern)?",
    "right": r"right|east(?:ern)?",
    "same column": r"same column",
}
_STRAIGHT = re.compile(r"\b(?:directly|straight|immediately|exactly)\b")
_DIAGONAL = {f"{row}{column}": f"{row} {column}" for row in ("north", "south") for column in ("east", "west")}
_END = r"[.;!?\n]"


def relation(player: Cell, thing: Cell) -> Relation:
    """Return where a thing is, seen from the player."""
    (row, column), (thing_row, thing_column) = player, thing
    return (
        "above" if thing_row < row else "below" if thing_row > row else "same row",
        "left" if thing_column < column else "right" if thing_column > column else "same column",
    )


def relations(facts: BoardFacts) -> dict[str, list[Relation]]:
    """Return the relations of all things of a board, by kind."""
    return {kind: [relation(facts.player, cell) for cell in cells] for kind, cells in facts.things.items()}


def claims(text: str, kinds: Iterable[str]) -> dict[str, list[Relation]]:
    """Return the relations that a text claims, by kind of thing. What is said of a thing ends where the next thing is
    named, or with the sentence."""
    kinds = list(kinds)
    words = re.sub("|".join(_DIAGONAL), lambda match: _DIAGONAL[match[0]], text.lower().replace("-", " "))
    names = "|".join(map(re.escape, kinds))
    pattern = re.compile(rf"\b({names})(?:s|es)?\b((?:(?!\b(?:{names})(?:s|es)?\b)(?!{_END}).)*)")
    found: dict[str, list[Relation]] = {kind: [] for kind in kinds}
    for match in pattern.finditer(words):
        if (claim := _claim(match[2])) is not None:
            found[match[1]].append(claim)
    return found


def relations_score(text: str, facts: BoardFacts) -> float:
    """Return the mean F1, 0 to 1, of what a text claims of the kinds of things that the board has or the text names."""
    said, true = claims(text, facts.things), relations(facts)
    kinds = [kind for kind in facts.things if said[kind] or true[kind]]
    return sum(f1(said[kind], true[kind]) for kind in kinds) / len(kinds) if kinds else 0.0


def _claim(words: str) -> Relation | None:
    """Return the relation in the words after a thing's name; None if they tell none."""
    rows = [name for name, pattern in _ROWS.items() if re.search(rf"\b(?:{pattern})\b", words)]
    columns = [name for name, pattern in _COLUMNS.items() if re.search(rf"\b(?:{pattern})\b", words)]
    if not rows and not columns:
        return None
    if _STRAIGHT.search(words):
        rows, columns = rows or ["same row"], columns or ["same column"]
    return (rows[0], columns[0]) if len(rows) == len(columns) == 1 else UNCLEAR
