"""Shortest ways in games in which the player walks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol, Self

from envs.boards.board import MOVES


class Walk(Hashable, Protocol):
    """A position of such a game."""

    @property
    def solved(self) -> bool: ...

    def moved(self, move: str) -> Self:
        """Return the position after one move."""


def shortest_way(start: Walk) -> list[str]:
    """Return a shortest way to a solved position, by a search breadth first; [] if this one is solved, or there is
    none."""
    came: dict[Walk, tuple[Walk, str]] = {}
    seen, queue = {start}, deque([start])
    while queue:
        now = queue.popleft()
        if now.solved:
            moves = []
            while now != start:
                now, move = came[now]
                moves.append(move)
            return moves[::-1]
        for move in MOVES:
            after = now.moved(move)
            if after not in seen:
                seen.add(after)
                came[after] = (now, move)
                queue.append(after)
    return []
