"""What a position looks like in words, for models that write down what they see before they move.

Cells are pairs of row and column, such as `23`. A state is the cells of the player and the boxes, the way from the
player to each box and from each box to its target as the crow flies, and the walled sides of player and boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envs.boards.board import MOVES, WALL, Board


def reading(board: Board) -> str:
    """All that there is to see: the targets, the inner walls, the state."""
    return f"{names(board, (*board.targets, *inner_walls(board)))} {state(board)}"


def inner_walls(board: Board) -> list[int]:
    """Cells of the walls that do not belong to the board's edge, in order."""
    height, width = board.height, board.width
    inside = (row * width + column for row in range(1, height - 1) for column in range(1, width - 1))
    return [cell for cell in inside if board.cells[cell] == WALL]


def state(board: Board) -> str:
    """What a move can change, such as `22 23 ^0>1 _1>0 #u #r`."""
    player, boxes = board.player, board.boxes
    pairs = [*((player, box) for box in boxes), *zip(boxes, board.targets, strict=False)]
    ways = [way(board, start, end) for start, end in pairs]
    return " ".join((names(board, (player, *boxes)), *ways, *(sides(board, cell) for cell in (player, *boxes))))


def way(board: Board, start: int, end: int) -> str:
    """From one cell to another, such as `^2>1`: two rows up, one column right (`_` is down, `<` left)."""
    down, right = end // board.width - start // board.width, end % board.width - start % board.width
    return f"{'_' if down > 0 else '^'}{abs(down)}{'<' if right < 0 else '>'}{abs(right)}"


def sides(board: Board, cell: int) -> str:
    """On which sides of a cell there are walls, such as `#ul`: above and on the left."""
    steps = (-board.width, board.width, -1, 1)
    return "#" + "".join(move[0] for move, step in zip(MOVES, steps, strict=True) if board.cells[cell + step] == WALL)


def moves_with_states(board: Board, moves: Sequence[str]) -> str:
    """The moves as far as they lead to the solution, and between them the states that they lead to."""
    return told(board, moves, lambda _, move: move, state)


def told(
    board: Board, moves: Sequence[str], move_said: Callable[[Board, str], str], state: Callable[[Board], str]
) -> str:
    """Each move as `move_said` calls it on the board before it, the states between them, and that of the solution."""
    words = []
    for number, move in enumerate(moves):
        words.append(move_said(board, move))
        board = board.moved(move)
        if board.solved or number + 1 < len(moves):
            words.append(state(board))
        if board.solved:
            break
    return " ".join(words)


def names(board: Board, cells: Sequence[int]) -> str:
    return " ".join(f"{cell // board.width}{cell % board.width}" for cell in cells)
