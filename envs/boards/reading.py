"""What a position looks like from its box, in words that read alike however the board is turned or mirrored.

The frame of a box is the one of the eight symmetries that brings its target ahead: `fore` is the direction in which the
target is farther away, `out` the side on which it lies, `back` and `in` are their opposites; where the target leaves
that open, the player decides in the same way, and then the order of FRAMES. A state such as

    @dr -1-1 >21 =12 #+0-1 ~f !fb

tells for each box: its frame (`fore` is down, `out` is right), how far fore and out of it the player and the target
are, how many free rows and columns of the board lie back and in of it, of each inner wall how far fore and out it is
and which move of the player leads into it (`fore`), and which moves lead nowhere (`fore` and `back`). In <think> the
cells of all there is to see are told too: target, player and box before the frame, each wall before its words. A wall
has the same number of words wherever it is, so that what was told of it lies always as far back. The other boxes are
told after the walls, as walls are. Boxes that are on a target come last; a move is said in the frame of the first box,
then as it is: `fore down`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from envs.boards.board import MOVES, TARGET, WALL, Board

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
    """The state, and all that there is to see as cells."""
    cells = (*board.targets, board.player, *board.boxes)
    return f"{names(board, cells)} {state(board, named=True)}"


@lru_cache(4096)
def state(board: Board, *, named: bool = False) -> str:
    """What a move can change; `named`: each wall's cell is told before it."""
    return " ".join(_around(board, *pair, named=named) for pair in paired(board))


def paired(board: Board) -> list[tuple[int, int]]:
    """Each box and its target. A box that is on a target is there to stay, and comes last; the others and the targets
    that are free come in the order of their cells."""
    settled = [box for box in board.boxes if board.cells[box] == TARGET]
    moving = [box for box in board.boxes if box not in settled]
    free = [target for target in board.targets if target not in settled]
    return [*zip(moving, free, strict=False), *zip(settled, settled, strict=True)]


def moves_with_states(board: Board, moves: Sequence[str]) -> str:
    """The moves as far as they lead to the solution, each in its frame and as it is; between them the states that they
    lead to, and that of the solution."""
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
    """Cells of the walls that do not belong to the board's edge, in order."""
    height, width = board.height, board.width
    inside = (row * width + column for row in range(1, height - 1) for column in range(1, width - 1))
    return [cell for cell in inside if board.cells[cell] == WALL]


def names(board: Board, cells: Sequence[int]) -> str:
    return " ".join(f"{cell // board.width}{cell % board.width}" for cell in cells)


def _said(board: Board, move: str) -> str:
    box, target = paired(board)[0]
    return f"{frame_of(board.width, box, target, board.player).said(move)} {move}"


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
    beside = "".join(turn[0] for turn, move in zip(TURNS, frame.moves, strict=True) if _STEPS[move] == (rows, columns))
    fore, out = frame.offset(cell // width - box // width, cell % width - box % width)
    return f"{names(board, [cell]) + ' ' if named else ''}#{fore:+d}{out:+d} ~{beside}"


def words() -> tuple[str, ...]:
    """Every word of boards of 6x6, for a tokenizer."""
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
