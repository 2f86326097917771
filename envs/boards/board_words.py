"""Describes a position as seen from its box, in words that are the same however the board is rotated or mirrored.

The frame of a box is the one of the eight symmetries in which its target lies ahead: `fore` is the direction in which
the target is farther away, `out` the side on which it lies; `back` and `in` are their opposites. If the target does not
decide this, the player does in the same way, and then the order of FRAMES. A state such as

    @dr -1-1 >21 =12 #+0-1 ~f !fb

has for each box: its frame (`fore` is down, `out` is right); how far fore and out of the box the player and the target
are; how many free rows and columns of the board lie back and in of it; for each inner wall, how far fore and out it is
and which move of the player leads into it (`fore`); and which moves are blocked (`fore` and `back`).
In <think>, the cells are named, too: target, player and box before the frame, each wall before its words. A wall always
has the same number of words, so that its description is always equally far back in the text. The other boxes follow the
walls, described as walls. Boxes on a target come last. A move is written first in the frame of the first box, then as
it is: `fore down`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from envs.boards.board import MOVES, STEPS, TARGET, WALL, Board

TURNS = ("fore", "back", "in", "out")
FARTHEST = 3
_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


@dataclass(frozen=True, slots=True)
class Frame:
    """A box's frame of reference: two directions at right angles."""

    fore: str
    out: str

    @property
    def word(self) -> str:
        return f"@{self.fore[0]}{self.out[0]}"

    def offset(self, rows: int, columns: int) -> tuple[int, int]:
        """Return (fore, out) of a displacement of `rows` down and `columns` right in this frame."""
        fore, out = STEPS[self.fore], STEPS[self.out]
        return rows * fore[0] + columns * fore[1], rows * out[0] + columns * out[1]

    def word_of(self, move: str) -> str:
        """Return the name of a move in this frame."""
        return TURNS[self.moves.index(move)]

    @property
    def moves(self) -> tuple[str, ...]:
        """The moves that correspond to the words in TURNS, in this order."""
        return self.fore, _OPPOSITE[self.fore], _OPPOSITE[self.out], self.out


FRAMES = tuple(Frame(fore, out) for fore in MOVES for out in MOVES if out not in (fore, _OPPOSITE[fore]))


def frame_of(width: int, box: int, target: int, player: int) -> Frame:
    """Return the frame in which the target is farthest fore and then farthest out; the player decides between
    equals."""
    ways = [(cell // width - box // width, cell % width - box % width) for cell in (target, player)]
    return max(FRAMES, key=lambda frame: [frame.offset(*way) for way in ways])


def reading(board: Board) -> str:
    """Return the text of <think>: the visible cells and the state."""
    cells = (*board.targets, board.player, *board.boxes)
    return f"{names(board, cells)} {state(board, named=True)}"


@lru_cache(4096)
def state(board: Board, *, named: bool = False) -> str:
    """Return the description of all boxes, which is the part of a reading that moves can change. With `named`, each
    wall's cell is written before its words."""
    return " ".join(_around(board, *pair, named=named) for pair in paired(board))


def paired(board: Board) -> list[tuple[int, int]]:
    """Return pairs of a box and its target. A box on a target is paired with it and comes last; the other boxes are
    paired with the free targets in the order of their cells."""
    settled = [box for box in board.boxes if board.cells[box] == TARGET]
    moving = [box for box in board.boxes if box not in settled]
    free = [target for target in board.targets if target not in settled]
    return [*zip(moving, free, strict=False), *zip(settled, settled, strict=True)]


def moves_with_states(board: Board, moves: Sequence[str]) -> str:
    """Return the moves up to the solution, each in its frame and as it is, with the states that they lead to in
    between, and the state of the solution."""
    words = []
    for number, move in enumerate(moves):
        words.append(_said(board, move))
        board = board.moved(move)
        if board.solved or number + 1 < len(moves):
            words.append(state(board))
        if board.solved:
            break
    return " ".join(words)


def inner_walls(board: Board) -> list[int]:
    """Return the cells of the walls inside the board's edge, in order."""
    height, width = board.height, board.width
    inside = (row * width + column for row in range(1, height - 1) for column in range(1, width - 1))
    return [cell for cell in inside if board.cells[cell] == WALL]


def names(board: Board, cells: Sequence[int]) -> str:
    return " ".join(f"{cell // board.width}{cell % board.width}" for cell in cells)


def _said(board: Board, move: str) -> str:
    box, target = paired(board)[0]
    return f"{frame_of(board.width, box, target, board.player).word_of(move)} {move}"


def _around(board: Board, box: int, target: int, *, named: bool) -> str:
    width, height = board.width, board.height
    frame = frame_of(width, box, target, board.player)
    row, column = divmod(box, width)
    room = {"up": row - 1, "down": height - 2 - row, "left": column - 1, "right": width - 2 - column}
    _, back, inward, _ = frame.moves
    player, ahead = (frame.offset(cell // width - row, cell % width - column) for cell in (board.player, target))
    others = [other for other in board.boxes if other != box]
    idle = [move for move in MOVES if board.moved(move) is board]
    words = (
        frame.word,
        f"{player[0]:+d}{player[1]:+d}",
        f">{ahead[0]}{ahead[1]}",
        f"={room[back]}{room[inward]}",
        *(_wall(board, frame, box, cell, named) for cell in (*inner_walls(board), *others)),
        "!" + "".join(turn[0] for turn, move in zip(TURNS, frame.moves, strict=True) if move in idle),
    )
    return " ".join(words)


def _wall(board: Board, frame: Frame, box: int, cell: int, named: bool) -> str:
    width = board.width
    rows, columns = cell // width - board.player // width, cell % width - board.player % width
    beside = "".join(turn[0] for turn, move in zip(TURNS, frame.moves, strict=True) if STEPS[move] == (rows, columns))
    fore, out = frame.offset(cell // width - box // width, cell % width - box % width)
    return f"{names(board, [cell]) + ' ' if named else ''}#{fore:+d}{out:+d} ~{beside}"


def words() -> tuple[str, ...]:
    """Return all words that boards of 6x6 need, for building a tokenizer."""
    inside, near, signed = range(1, 5), range(FARTHEST + 1), range(-FARTHEST, FARTHEST + 1)
    offsets = [f"{fore:+d}{out:+d}" for fore in signed for out in signed]
    return (
        *TURNS,
        *(f"{row}{column}" for row in inside for column in inside),
        *(frame.word for frame in FRAMES),
        *offsets,
        *(f">{fore}{out}" for fore in near for out in range(fore + 1)),
        *(f"={back}{inward}" for back in near for inward in near),
        *(f"#{offset}" for offset in offsets),
        *("~" + beside for beside in ("", "f", "b", "i", "o")),
        *("!" + "".join(turn[0] for turn in idle) for count in range(5) for idle in combinations(TURNS, count)),
    )
