"""Sokoban solver: shortest in moves for one box, A* over pushes for several.

Sets of cells are Python integers used as bit boards (bit c = cell c), so that a flood fill is a few shifts. The walls
around the board keep shifted bits from wrapping over its edge.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from envs.boards.board import MOVES, TARGET, WALL, Board

FAR = 1 << 20


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search: the moves, or None. If `proven`, None means that the board cannot be solved; else the
    search has reached its limit."""

    moves: list[str] | None
    proven: bool = True


def solve(board: Board, *, max_nodes: int = 200_000, weight: float = 2.0) -> list[str] | None:
    """Return moves that solve `board`: [] if it is solved, None if there are none or none was found within the limit.
    For one box they are as few moves as possible. For several boxes the search is A* over pushes, and weight 1 gives as
    few pushes as possible.
    """
    return search(board, max_nodes=max_nodes, weight=weight).moves


def optimal_first_moves(board: Board) -> list[str]:
    """Return a shortest solution from any state, the next best move first; [] if the board is solved or cannot be
    solved."""
    return solve(board, weight=1.0) or []


def search(board: Board, *, max_nodes: int = 200_000, weight: float = 2.0) -> Search:
    """Search as `solve` does; the result also says whether None proves that there is no solution."""
    if board.solved:
        return Search([])
    if len(board.boxes) == 1:
        return Search(_one_box(board))
    return _PushSearch(board, weight).run(max_nodes)


def _one_box(board: Board) -> list[str] | None:
    """Search breadth first over (player, box). This is exact, and a 6x6 board has only 256 states."""
    cells, size = board.cells, len(board.cells)
    steps = (-board.width, board.width, -1, 1)
    table = _maze(board.height, board.width, cells).pull_distance
    if table[board.boxes[0]] >= FAR:
        return None
    start = board.player * size + board.boxes[0]
    parents = {start: (start, 0)}
    queue = deque((start,))
    while queue:
        state = queue.popleft()
        player, box = divmod(state, size)
        for index in range(4):
            step = steps[index]
            to = player + step
            if to == box:
                behind = box + step
                if table[behind] >= FAR:
                    continue
                new = to * size + behind
                if cells[behind] == TARGET:
                    parents[new] = (state, index)
                    return _trace(parents, start, new)
            elif cells[to]:
                new = to * size + box
            else:
                continue
            if new not in parents:
                parents[new] = (state, index)
                queue.append(new)
    return None


def _trace(parents: dict[int, tuple[int, int]], start: int, state: int) -> list[str]:
    moves = []
    while state != start:
        state, index = parents[state]
        moves.append(MOVES[index])
    return moves[::-1]


@dataclass(frozen=True, slots=True)
class Maze:
    """Facts that depend only on walls and targets. `to_target[t][c]` is the number of pushes that a lone box needs from
    cell c to target t, or FAR. `floor`, `live` and `targets` are sets of cells."""

    to_target: tuple[tuple[int, ...], ...]
    pull_distance: tuple[int, ...]  # pushes to the nearest target, FAR on dead cells and walls
    floor: int
    live: int
    targets: int


@lru_cache(maxsize=4096)
def _maze(height: int, width: int, cells: bytes) -> Maze:
    steps = (-width, width, -1, 1)
    targets = [cell for cell, code in enumerate(cells) if code == TARGET]
    tables = []
    for target in targets:
        distance = [FAR] * len(cells)
        distance[target] = 0
        queue = deque((target,))
        while queue:
            cell = queue.popleft()
            for step in steps:
                came, player = cell - step, cell - 2 * step
                if cells[came] and 0 <= player < len(cells) and cells[player] and distance[came] == FAR:
                    distance[came] = distance[cell] + 1
                    queue.append(came)
        tables.append(tuple(distance))
    nearest = tuple(min(column) for column in zip(*tables, strict=True))
    return Maze(
        to_target=tuple(tables),
        pull_distance=nearest,
        floor=sum(1 << cell for cell, code in enumerate(cells) if code != WALL),
        live=sum(1 << cell for cell, value in enumerate(nearest) if value < FAR),
        targets=sum(1 << target for target in targets),
    )


class _PushSearch:
    """Weighted A* over states (boxes, the player's region); a step is one push."""

    def __init__(self, board: Board, weight: float) -> None:
        self.board, self.weight = board, weight
        self.width = board.width
        self.maze = _maze(board.height, board.width, board.cells)
        self.walls = ((1 << len(board.cells)) - 1) & ~self.maze.floor
        self.bounds: dict[int, int] = {}

    def run(self, max_nodes: int) -> Search:
        boxes = sum(1 << box for box in self.board.boxes)
        region = self.reach(1 << self.board.player, boxes)
        start = (boxes, region & -region)
        bound = self.bound(boxes)
        if bound >= FAR:
            return Search(None)
        parents: dict[tuple[int, int], tuple[tuple[int, int], int, int]] = {}
        pushes = {start: 0}
        heap = [(self.weight * bound, 0, 0, start)]
        nodes = serial = 0
        closed = set()
        while heap:
            _, _, _, state = heapq.heappop(heap)
            if state in closed:
                continue
            closed.add(state)
            if state[0] & self.maze.targets == state[0]:
                return Search(self.moves(parents, start, state))
            nodes += 1
            if nodes > max_nodes:
                return Search(None, proven=False)
            cost = pushes[state] + 1
            for new, box, step in self.successors(state):
                if new in pushes and pushes[new] <= cost:
                    continue
                bound = self.bound(new[0])
                if bound >= FAR:
                    continue
                pushes[new] = cost
                parents[new] = (state, box, step)
                closed.discard(new)
                serial += 1
                heapq.heappush(heap, (cost + self.weight * bound, bound, serial, new))
        return Search(None)

    def reach(self, player: int, boxes: int) -> int:
        """Return all cells that the player can walk to."""
        width, free = self.width, self.maze.floor & ~boxes
        region = player
        while True:
            grown = region | ((region << 1 | region >> 1 | region << width | region >> width) & free)
            if grown == region:
                return region
            region = grown

    def successors(self, state: tuple[int, int]) -> list[tuple[tuple[int, int], int, int]]:
        """Return (new state, box before the push, step) for each push that leaves no obvious deadlock."""
        boxes, player = state
        region = self.reach(player, boxes)
        open_cells = self.maze.live & ~boxes
        width = self.width
        states = []
        for step in (-width, width, -1, 1):
            if step > 0:
                movable = boxes & (region << step) & (open_cells >> step)
            else:
                movable = boxes & (region >> -step) & (open_cells << -step)
            while movable:
                bit = movable & -movable
                movable ^= bit
                to = bit << step if step > 0 else bit >> -step
                pushed = boxes ^ bit ^ to
                if self.frozen(to, pushed):
                    continue
                grown = self.reach(bit, pushed)
                states.append(((pushed, grown & -grown), bit.bit_length() - 1, step))
        return states

    def frozen(self, bit: int, boxes: int) -> bool:
        """Tell whether the box just pushed can never move again, and it or a box that blocks it is not on a target."""
        stuck: list[int] = []
        return self._stuck(bit, boxes, self.walls, stuck) and any(not cell & self.maze.targets for cell in stuck)

    def _stuck(self, bit: int, boxes: int, walls: int, stuck: list[int]) -> bool:
        """Tell whether box `bit` is blocked along both axes; if so, add it and the boxes that block it to `stuck`."""
        walls |= bit  # a box already being examined counts as a wall
        mark = len(stuck)
        stuck.append(bit)
        for shift in (1, self.width):
            near, far = bit << shift, bit >> shift
            if (near | far) & walls or not (near | far) & self.maze.live:
                continue
            if near & boxes and self._stuck(near, boxes, walls, stuck):
                continue
            if far & boxes and self._stuck(far, boxes, walls, stuck):
                continue
            del stuck[mark:]
            return False
        return True

    def bound(self, boxes: int) -> int:
        """Return the fewest pushes if boxes did not block each other: the cheapest assignment of boxes to targets."""
        cached = self.bounds.get(boxes)
        if cached is None:
            cached = self.bounds[boxes] = _assignment(_bits(boxes), self.maze.to_target)
        return cached

    def moves(self, parents: dict, start: tuple[int, int], state: tuple[int, int]) -> list[str]:
        """Return the moves: the pushes, with the shortest walks between them."""
        pushes = []
        while state != start:
            state, box, step = parents[state]
            pushes.append((state[0], box, step))
        names = dict(zip((-self.width, self.width, -1, 1), MOVES, strict=True))
        player, moves = self.board.player, []
        for boxes, box, step in reversed(pushes):
            moves += [names[walk] for walk in self.walk(player, box - step, boxes)] + [names[step]]
            player = box
        return moves

    def walk(self, start: int, goal: int, boxes: int) -> list[int]:
        """Return the steps of a shortest walk from `start` to `goal` around the boxes."""
        came = {start: 0}
        queue = deque((start,))
        while goal not in came:
            cell = queue.popleft()
            for step in (-self.width, self.width, -1, 1):
                to = cell + step
                if to not in came and self.maze.floor >> to & 1 and not boxes >> to & 1:
                    came[to] = step
                    queue.append(to)
        steps = []
        while goal != start:
            steps.append(came[goal])
            goal -= came[goal]
        return steps[::-1]


def _bits(value: int) -> list[int]:
    cells = []
    while value:
        bit = value & -value
        cells.append(bit.bit_length() - 1)
        value ^= bit
    return cells


def _assignment(boxes: list[int], to_target: tuple[tuple[int, ...], ...]) -> int:
    """Return the cost of the cheapest one-to-one assignment. Exact up to 8 boxes (dynamic programming over sets of used
    targets); a lower bound beyond."""
    if len(boxes) > 8:
        return sum(min(table[box] for table in to_target) for box in boxes)
    best = {0: 0}
    for box in boxes:
        costs = [(1 << index, table[box]) for index, table in enumerate(to_target) if table[box] < FAR]
        grown: dict[int, int] = {}
        for used, cost in best.items():
            for bit, extra in costs:
                if not used & bit:
                    key = used | bit
                    total = cost + extra
                    if total < grown.get(key, FAR):
                        grown[key] = total
        if not grown:
            return FAR
        best = grown
    return min(best.values())
