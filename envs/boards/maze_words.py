"""Describes a maze in words, as the small models write it in <think>.

    21 key 00 -2-1 door 13 -1+2 goal 44 +2+3 u2 d2 l1 r0 !r

The player's cell; the key until it is taken, the door and the goal, each with its cell and how many rows down and
columns to the right of the player it lies; how many cells are free above, below, to the left and to the right of the
player; and which moves are blocked.
"""

from __future__ import annotations

from envs.boards.board import MOVES
from envs.boards.maze_board import DOOR, WALL, MazeBoard
from envs.boards.place_words import barred, named, placed

FARTHEST = 4


def reading(maze: MazeBoard) -> str:
    """Return the text of <think>."""
    places = {"key": maze.key, "door": maze.door, "goal": maze.goal}
    if maze.has_key:
        del places["key"]
    ahead = " ".join(f"{name} {placed(cell, maze.player, maze.width)}" for name, cell in places.items())
    free = " ".join(f"{move[0]}{free_cells(maze, move)}" for move in MOVES)
    return f"{named(maze.player, maze.width)} {ahead} {free} {barred(m for m in MOVES if maze.moved(m) is maze)}"


def free_cells(maze: MazeBoard, move: str) -> int:
    """Return how many cells the player can walk in a direction, at most FARTHEST; a locked door blocks."""
    cell, count = maze.beside(maze.player, move), 0
    while cell is not None and count < FARTHEST and maze.cells[cell] != WALL:
        if maze.cells[cell] == DOOR and not maze.has_key:
            break
        cell, count = maze.beside(cell, move), count + 1
    return count


def maze_words() -> tuple[str, ...]:
    """Return the words beside those for places, for building a tokenizer."""
    return ("key", "door", "goal", *(f"{move[0]}{count}" for move in MOVES for count in range(FARTHEST + 1)))
