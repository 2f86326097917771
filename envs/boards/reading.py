"""What a position looks like from its box, in words that read alike however the board is turned or mirrored.

The frame of a box is the one of the eight symmetries that brings its target ahead: `fore` is the direction in which the
target is farther away, `out` the side on which it lies, `back` and `in` are their opposites; where the target leaves
that open, the player decides in the same way, and then the order of FRAMES. A state such as

    @dr -1-1 >21 =12 #+0-1 !bi

tells for each box: its frame (`fore` is down, `out` is right), how far fore and out of it the player and the target
are, how many free rows and columns of the board lie back and in of it, how far fore and out each inner wall is, in the
order in which reading names them, and which moves of the player lead nowhere (`back` and `in`). What there is to see is
told before it as cells: the targets, the player, the boxes, the inner walls. A move is said in the frame of the first
box that is not on its target, then as it is: `fore down`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from envs.boards.board import MOVES, WALL, Board

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
    """All that there is to see as cells, and the state."""
    cells = (*board.targets, board.player, *board.boxes, *inner_walls(board))
    return f"{names(board, cells)} {state(board)}"


@lru_cache(4096)
def state(board: Board) -> str:
    """What a move can change."""
    walls = inner_walls(board)
    idle = [move for move in MOVES if board.moved(move) is board]
    return " ".join(_around(board, *pair, walls, idle) for pair in zip(board.boxes, board.targets, strict=False))


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
    pairs = list(zip(board.boxes, board.targets, strict=False))
    box, target = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    return f"{frame_of(board.width, box, target, board.player).said(move)} {move}"


def _around(board: Board, box: int, target: int, walls: Sequence[int], idle: Sequence[str]) -> str:
    width, height = board.width, board.height
    frame = frame_of(width, box, target, board.player)
    row, column = divmod(box, width)
    room = {"up": row - 1, "down": height - 2 - row, "left": column - 1, "right": width - 2 - column}
    _, back, inward, _ = frame.moves
    player, ahead, *far = (
        frame.offset(cell // width - row, cell % width - column) for cell in (board.player, target, *walls)
    )
    words = (
        frame.word,
        f"{player[0]:+d}{player[1]:+d}",
        f">{ahead[0]}{ahead[1]}",
        f"={room[back]}{room[inward]}",
        *(f"#{fore:+d}{out:+d}" for fore, out in far),
        "!" + "".join(turn[0] for turn, move in zip(TURNS, frame.moves, strict=True) if move in idle),
    )
    return " ".join(words)


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
        *("!" + "".join(turn[0] for turn in idle) for count in range(5) for idle in combinations(TURNS, count)),
    )
