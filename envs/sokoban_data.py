"""Sokoban datasets: make boards, read them from level files or from the raw public dataset, split them, write them.

A written row has the columns of the public processed dataset: `prompt`, `images` (one PNG data URI) and
`extra_info.env_config`; `extra_info.solution_length` says how difficult the board is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from envs.datasets import data_uri, read_rows
from envs.sokoban import SYSTEM_PROMPT
from envs.sokoban_boards import SYMBOLS, Board, BoardSpec, board_of, canonical, make_board
from envs.sokoban_render import png, render
from envs.sokoban_solver import solve

MAX_REPEATS = 2_000


@dataclass(frozen=True, slots=True)
class Split:
    """Boards of which no two are the same but for a rotation or mirror image, neither inside nor across the parts."""

    train: list[Board]
    heldout: list[Board]
    duplicates: int


def make_boards(count: int, spec: BoardSpec, seed: int = 0) -> list[Board]:
    """`count` different solvable boards. ValueError if `spec` admits fewer."""
    boards: list[Board] = []
    seen: set[bytes] = set()
    repeats = 0
    while len(boards) < count:
        board = make_board(f"{seed}/{len(boards)}/{repeats}", spec)
        form = canonical(board)
        if form in seen:
            repeats += 1
            if repeats > MAX_REPEATS + count:
                raise ValueError(
                    f"only {len(boards)} of {count} boards differ for {spec}: ask for fewer or larger ones"
                )
            continue
        seen.add(form)
        boards.append(board)
    return boards


def split_boards(boards: Iterable[Board], num_heldout: int, seed: int = 0) -> Split:
    """A random split; of boards that are the same up to symmetry only the first is kept."""
    kept: dict[bytes, Board] = {}
    total = 0
    for board in boards:
        total += 1
        kept.setdefault(canonical(board), board)
    if not 0 <= num_heldout < len(kept):
        raise ValueError(f"{num_heldout} held-out boards of {len(kept)} different ones leave none to train on")
    shuffled = list(kept.values())
    Random(seed).shuffle(shuffled)
    return Split(shuffled[num_heldout:], shuffled[:num_heldout], total - len(kept))


def boards_of_raw(path: str | Path) -> tuple[list[Board], int]:
    """Boards drawn in text in the `prompt` column of a raw file, and the number of rows without one."""
    boards, failed = [], 0
    for number, row in enumerate(read_rows(Path(path))):
        if number == 0 and "prompt" not in row:
            raise ValueError(f"{path} has no column 'prompt'; it has: {', '.join(map(str, row))}")
        try:
            boards.append(board_in_text(_prompt_text(row["prompt"])))
        except ValueError:
            failed += 1
    if not boards:
        raise ValueError(f"{path} holds no board: none of its {failed} prompts draws one")
    return boards, failed


def board_in_text(text: str) -> Board:
    """The first board drawn in `text` with the symbols of the text mode. ValueError if there is none."""
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


def rows_of(boards: Iterable[Board], pixels_per_cell: int = 64, max_nodes: int = 50_000) -> Iterator[dict[str, Any]]:
    """The boards as dataset rows; one that the solver cannot solve within `max_nodes` is left out."""
    for board in boards:
        moves = solve(board, max_nodes=max_nodes)
        if not moves:
            continue
        picture = png(render(board.codes(), board.height, board.width, pixels_per_cell))
        config = {**board.env_config(), "render_mode": "vision", "max_steps": 100}
        yield {
            "prompt": f"{SYSTEM_PROMPT}\n<image>",
            "images": [data_uri(picture)],
            "extra_info": {"env_config": config, "solution_length": len(moves)},
        }


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (list, tuple)):
        return "\n".join(str(message["content"]) for message in prompt if isinstance(message, dict))
    raise ValueError("a prompt is neither text nor messages")
