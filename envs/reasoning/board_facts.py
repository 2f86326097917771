"""What a description of a board is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

Cell = tuple[int, int]  # (row, column)


@dataclass(frozen=True, slots=True)
class BoardFacts:
    """A position of a game on a grid. `things` are the cells of each kind of thing that relations are told of, by the
    kind's name; `rows` are the symbols of all cells, of which `floor` and `wall` mark no things."""

    player: Cell
    things: Mapping[str, tuple[Cell, ...]]
    rows: tuple[str, ...]
    floor: str = "_"
    wall: str = "#"

    @classmethod
    def of(cls, width: int, symbols: str, player: Cell, things: Mapping[str, Sequence[Cell]]) -> Self:
        """Return facts from the symbols of all cells, row by row."""
        rows = tuple(symbols[start : start + width] for start in range(0, len(symbols), width))
        return cls(player, {kind: tuple(cells) for kind, cells in things.items()}, rows)


def f1(said: Iterable[Hashable], true: Iterable[Hashable]) -> float:
    """Return the F1 of what is said against what is true, each thing as often as it stands there; 1 without any."""
    claimed, facts = Counter(said), Counter(true)
    total = claimed.total() + facts.total()
    return 2 * (claimed & facts).total() / total if total else 1.0
