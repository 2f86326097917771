"""Sokoban datasets: make boards, read them from level files or from the raw public dataset, split them, write them.

A written row has the columns of the public processed dataset: `prompt`, `images` (one PNG data URI) and
`extra_info.env_config`; `extra_info.solution_length` says how difficult the board is. How a board is shown, and how
many moves may be played, is up to the recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from envs.boards.board import SYMBOLS, Board, board_from_config, board_of, canonical
from envs.boards.board_images import png, render
from envs.boards.generate import BoardSpec, make_board
from envs.boards.levels import iter_levels
from envs.boards.solver import solve
from envs.datasets import MAX_LISTED, Tick, data_uri, env_config, no_tick
from envs.row_files import read_rows
from envs.sokoban import SYSTEM_PROMPT

MAX_REPEATS = 2_000


@dataclass(slots=True)
class Reading:
    """The boards read from a file, the number of unreadable ones, and the first few of these with their reasons."""

    boards: list[Board] = field(default_factory=list)
    unreadable: int = 0
    examples: list[str] = field(default_factory=list)

    def refuse(self, place: str, reason: object) -> None:
        self.unreadable += 1
        if self.unreadable <= MAX_LISTED:
            self.examples.append(f"{place}: {reason}")


def make_boards(count: int, spec: BoardSpec, seed: int = 0, tick: Tick = no_tick) -> list[Board]:
    """Make `count` different solvable boards. Raise ValueError if `spec` allows fewer."""
    boards: dict[bytes, Board] = {}
    repeats = 0
    while len(boards) < count:
        board = make_board(f"{seed}/{len(boards)}/{repeats}", spec)
        form = canonical(board)
        repeats += form in boards
        if repeats > MAX_REPEATS + count:
            raise ValueError(f"only {len(boards)} of {count} boards differ for {spec}: ask for fewer or larger ones")
        boards.setdefault(form, board)
        tick(len(boards))
    return list(boards.values())


def different(boards: Iterable[Board]) -> tuple[list[Board], int]:
    """Return the boards without those that are rotations or mirror images of an earlier one, and the number of the
    latter."""
    by_form: dict[bytes, Board] = {}
    firsts = [by_form.setdefault(canonical(board), board) for board in boards]
    return list(by_form.values()), len(firsts) - len(by_form)


def split_boards(boards: Sequence[Board], num_heldout: int, seed: int = 0) -> tuple[list[Board], list[Board]]:
    """Split boards, which must be `different`, into (train, held out) at random. Raise ValueError if none is left to
    train on."""
    if not 0 <= num_heldout < len(boards):
        raise ValueError(f"{num_heldout} held-out boards of {len(boards)} different ones leave none to train on")
    shuffled = list(boards)
    Random(seed).shuffle(shuffled)
    return shuffled[num_heldout:], shuffled[:num_heldout]


def read_boards(path: str | Path, tick: Tick = no_tick) -> Reading:
    """Return the boards of a dataset (processed, or raw with boards drawn in `prompt`) or of a level file (XSB
    notation).

    Raise ValueError for a missing file, a missing column, or a file without any board.
    """
    path, reading = Path(path), Reading()
    if path.suffix in (".parquet", ".jsonl"):
        _read_rows(path, reading, tick)
    elif not path.is_file():
        raise ValueError(f"no file {str(path)!r}: give a .parquet or .jsonl dataset or a level file")
    else:
        for number, level in enumerate(iter_levels(path)):
            tick(number + 1)
            if isinstance(level, ValueError):
                reading.refuse(f"{path.name} level {number}", level)
            else:
                reading.boards.append(level)
    if not reading.boards:
        faults = f"{reading.unreadable} unreadable, such as {''.join(reading.examples[:1])}"
        raise ValueError(f"{path} holds no board: {faults if reading.unreadable else 'no level in it'}")
    return reading


def _read_rows(path: Path, reading: Reading, tick: Tick) -> None:
    def refuse(number: int, reason: str) -> None:
        reading.refuse(f"{path.name} row {number}", ValueError(reason))

    first = True
    for number, row in read_rows(path, refuse):
        tick(number + 1)
        config = env_config(row)
        first, was_first = False, first
        if was_first and config is None and "prompt" not in row:
            raise ValueError(f"{path} has no column 'prompt' or 'extra_info'; it has: {', '.join(map(str, row))}")
        try:
            if config is not None and config.get("initial_base_grid") is not None:
                reading.boards.append(board_from_config(config))
            else:
                reading.boards.append(board_in_text(_prompt_text(row.get("prompt"))))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are read
            reading.refuse(f"{path.name} row {number}", error)


def board_in_text(text: str) -> Board:
    """Return the first board drawn in `text` with the symbols of the text mode. Raise ValueError if there is none."""
    rows: list[bytes] = []
    for line in [*text.splitlines(), ""]:
        cells = line.split()
        if len(cells) >= 3 and all(len(cell) == 1 and cell in SYMBOLS for cell in cells):
            rows.append(bytes(SYMBOLS.index(cell) for cell in cells))
        elif len(rows) >= 3:
            break
        else:
            rows = []
    if len(rows) < 3 or len({len(row) for row in rows}) > 1:
        raise ValueError("the text draws no board")
    return board_of(len(rows), len(rows[0]), b"".join(rows))


def row_of(board: Board, pixels_per_cell: int = 64, max_nodes: int = 50_000) -> dict[str, Any] | None:
    """Return the board as a dataset row; None if the solver finds no solution within `max_nodes`, or if the board is
    already solved."""
    moves = solve(board, max_nodes=max_nodes)
    if not moves:
        return None
    image = png(render(board.codes(), board.height, board.width, pixels_per_cell))
    return {
        "prompt": f"{SYSTEM_PROMPT}\n<image>",
        "images": [data_uri(image)],
        "extra_info": {"env_config": board.env_config(), "solution_length": len(moves)},
    }


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (list, tuple)):
        return "\n".join(str(message["content"]) for message in prompt if isinstance(message, dict))
    raise ValueError("a prompt is neither text nor messages")
