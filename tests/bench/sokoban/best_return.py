"""What the best play of a Sokoban board earns, where turns' rewards are trained on, beside the shortest solution.

    python -m tests.bench.sokoban.best_return [--boards 200] [--boxes 2] [--off-target -0.5] [--gamma 0.97]

The best sum of moves' rewards over 24 moves, three a turn, discounted between turns, is found exactly, by dynamic
programming over positions; a game ends as it is solved. Boards whose shortest solution has more than 14 moves are left
out. The last line is one JSON object: on how many boards the best play earns 0.2 more than the shortest solution, and
how many of the best plays solve their board.
"""

from __future__ import annotations

import argparse
import json
from functools import cache

from envs.boards.board import MOVES, Board
from envs.boards.generate import BoardSpec, make_board
from envs.boards.solver import optimal_first_moves
from envs.sokoban import OFF_TARGET_REWARD, move_reward
from tests.bench.sokoban.planner import MOVES_A_TURN, TURNS

LONGEST, MUCH = 14, 0.2


def best_return(board: Board, gamma: float, off_target: float) -> tuple[float, bool]:
    """Of all plays from `board` on; and whether the play that has it solves the board."""

    @cache
    def best(position: Board, made: int) -> tuple[float, bool]:
        if made == TURNS * MOVES_A_TURN or position.solved:
            return 0.0, position.solved
        discount = gamma if (made + 1) % MOVES_A_TURN == 0 else 1.0
        found = []
        for move in MOVES:
            after = position.moved(move)
            value, solved = best(after, made + 1)
            found.append((move_reward(position, after, off_target) + discount * value, solved))
        return max(found)

    return best(board, 0)


def shortest_return(board: Board, gamma: float, off_target: float) -> float:
    """Of a shortest solution."""
    total, made = 0.0, 0
    while not board.solved:
        after = board.moved(optimal_first_moves(board)[0])
        total += gamma ** (made // MOVES_A_TURN) * move_reward(board, after, off_target)
        board, made = after, made + 1
    return total


def measure(count: int, boxes: int, gamma: float, off_target: float) -> dict[str, float]:
    boards = [make_board(seed, BoardSpec(num_boxes=(boxes,))) for seed in range(count)]
    boards = [board for board in boards if len(optimal_first_moves(board)) <= LONGEST]
    found = [(*best_return(board, gamma, off_target), shortest_return(board, gamma, off_target)) for board in boards]
    gains = [best - shortest for best, _, shortest in found]
    return {
        "boards": len(boards),
        "more_by_0.2": sum(gain > MUCH for gain in gains),
        "mean_gain": round(sum(gains) / len(gains), 3),
        "most": round(max(gains), 2),
        "best_solves": sum(solved for _, solved, _ in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, default=200)
    parser.add_argument("--boxes", type=int, default=2)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--off-target", type=float, default=OFF_TARGET_REWARD)
    options = parser.parse_args()
    found = measure(options.boards, options.boxes, options.gamma, options.off_target)
    print(json.dumps(vars(options) | found))


if __name__ == "__main__":
    main()
