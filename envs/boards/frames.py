"""What a position looks like from its box, in words that read alike however the board is turned or mirrored.

The frame of a box is the one of the eight symmetries that brings its target ahead: `fore` is the direction in which the
target is farther away, `out` the side on which it lies, `back` and `in` are their opposites; where the target leaves
that open, the player decides in the same way, and then the order of FRAMES. A state such as

    11 22 @dr -1-1 >21 %fbio *14 :21 .12

is the cells of the player and the boxes, and for each box: its frame (`fore` is down, `out` is right), how far fore and
out of it the player and the target are, which sides have no wall, at which corners there are walls (1 fore out, 2 fore
in, 3 back out, 4 back in), and the free cells up to the next wall fore and back, in and out, each at most 3. A move is
said in the frame of the first box that is not on its target, then as it is: `fore down`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from envs.boards.board import MOVES, WALL, Board
from envs.boards.reading import names, told

TURNS = ("fore", "back", "in", "out")
FARTHEST = 3
_STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


@dataclass(frozen=True, slots=True)
class Frame:
    """Two directions at right angles."""

    fore: str
    out: str

    @property
    def word(self) -> str:
        return f"@{self.fore[0]}{self.out[0]}"

    def offset(self, rows: int, columns: int) -> tuple[int, int]:
        """How far fore and out a way of so many rows down and columns right leads."""
        fore, out = _STEPS[self.fore], _STEPS[self.out]
        return rows * fore[0] + columns * fore[1], rows * out[0] + columns * out[1]

    def said(self, move: str) -> str:
        """What a move is called in this frame."""
        return TURNS[self.moves.index(move)]

    @property
    def moves(self) -> tuple[str, ...]:
        """The moves that TURNS stand for."""
        return self.fore, _OPPOSITE[self.fore], _OPPOSITE[self.out], self.out


FRAMES = tuple(Frame(fore, out) for fore in MOVES for out in MOVES if out not in (fore, _OPPOSITE[fore]))


def frame_of(width: int, box: int, target: int, player: int) -> Frame:
    """The frame in which the target, then the player, is farthest fore and then farthest out."""
    ways = [(cell // width - box // width, cell % width - box % width) for cell in (target, player)]
    return max(FRAMES, key=lambda frame: [frame.offset(*way) for way in ways])


def reading(board: Board) -> str:
    """All that is told of what there is to see: the targets and the state."""
    return f"{names(board, board.targets)} {state(board)}"


@lru_cache(4096)
def state(board: Board) -> str:
    """What a move can change."""
    pairs = zip(board.boxes, board.targets, strict=False)
    return " ".join((names(board, (board.player, *board.boxes)), *(_around(board, *pair) for pair in pairs)))


def moves_with_states(board: Board, moves: Sequence[str]) -> str:
    """The moves as far as they lead to the solution, each in its frame and as it is, and between them the states that
    they lead to."""
    return told(board, moves, _said, state)


def _said(board: Board, move: str) -> str:
    pairs = list(zip(board.boxes, board.targets, strict=False))
    box, target = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    return f"{frame_of(board.width, box, target, board.player).said(move)} {move}"


def _around(board: Board, box: int, target: int) -> str:
    width = board.width
    frame = frame_of(width, box, target, board.player)
    fore, back, inward, out = (rows * width + columns for rows, columns in map(_STEPS.__getitem__, frame.moves))
    steps = (fore, back, inward, out)
    free = [_free(board, box, step) for step in steps]
    corners = (fore + out, fore + inward, back + out, back + inward)
    player, ahead = (
        frame.offset(cell // width - box // width, cell % width - box % width) for cell in (board.player, target)
    )
    words = (
        frame.word,
        f"{player[0]:+d}{player[1]:+d}",
        f">{ahead[0]}{ahead[1]}",
        "%" + "".join(name[0] for name, cells in zip(TURNS, free, strict=True) if cells),
        "*" + "".join(str(i) for i, corner in enumerate(corners, start=1) if board.cells[box + corner] == WALL),
        f":{free[0]}{free[1]}",
        f".{free[2]}{free[3]}",
    )
    return " ".join(words)


def _free(board: Board, cell: int, step: int) -> int:
    """Cells up to the next wall, at most FARTHEST."""
    for count in range(FARTHEST):
        cell += step
        if board.cells[cell] == WALL:
            return count
    return FARTHEST


def words() -> tuple[str, ...]:
    """Every word of boards of 6x6, for a tokenizer."""
    inside, near, signed = range(1, 5), range(FARTHEST + 1), range(-FARTHEST, FARTHEST + 1)
    return (
        *TURNS,
        *(f"{row}{column}" for row in inside for column in inside),
        *(frame.word for frame in FRAMES),
        *(f"{fore:+d}{out:+d}" for fore in signed for out in signed),
        *(f">{fore}{out}" for fore in near for out in range(fore + 1)),
        *("%" + _chosen("fbio", bits) for bits in range(16)),
        *("*" + _chosen("1234", bits) for bits in range(16)),
        *(f"{sign}{first}{second}" for sign in ":." for first in near for second in near),
    )


def _chosen(names: str, bits: int) -> str:
    return "".join(name for i, name in enumerate(names) if bits >> i & 1)
