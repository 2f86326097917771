"""Speed of environments and rewards on one core: python tests/bench/envs.py"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from envs.math_reward import grade
from envs.sokoban import build_env, random_response
from envs.sokoban_boards import BoardSpec, make_board
from envs.sokoban_levels import read_levels
from envs.sokoban_render import png
from envs.sokoban_solver import search
from shared.types import Sample

ANSWERS = [random_response(Random(seed)) for seed in range(1000)]


def rate(name: str, unit: str, run: Callable[[], int]) -> None:
    """Print how many things `run` (which returns their number) did a second."""
    started = time.perf_counter()
    count = run()
    print(f"{name:32} {count / (time.perf_counter() - started):12,.0f} {unit}")


def moves() -> int:
    env, count = build_env(Sample("x", metadata={"seed": 1}), {"render_mode": "text", "max_steps": 10**9}), 0
    for turn in range(10_000):
        _, done, info = env.step(ANSWERS[turn % 1000])
        count += len(info["parsed_actions"])
        if done:
            env.reset()
    return count


def pictures() -> int:
    env = build_env(Sample("x", metadata={"seed": 1}), {"pixels_per_cell": 32})
    for turn in range(2000):
        observation, done, _ = env.step(ANSWERS[turn % 1000])
        png(observation["multi_modal_data"]["image"][0])
        if done:
            env.reset()
    return 2000


def boards() -> int:
    for seed in range(1000):
        make_board(seed, BoardSpec())
    return 1000


def grades() -> int:
    for number in range(2000):
        grade(rf"so \boxed{{{number}\sqrt{{3}}}}", r"5 \sqrt { 3 }")
    return 2000


def levels() -> int:
    found = read_levels(ROOT / "tests/data/boxoban/medium_valid_000.txt")[:200]
    unsolved = sum(search(board, max_nodes=10**9, time_s=5.0).moves is None for board in found)
    print(f"{'Boxoban levels solved in 5 s':32} {100 * (1 - unsolved / len(found)):12.1f} %")
    return len(found)


if __name__ == "__main__":
    rate("Sokoban, text", "moves/s", moves)
    rate("Sokoban, 6x6 at 32 px, with PNG", "pictures/s", pictures)
    rate("boards made and solved", "boards/s", boards)
    rate("answers graded", "answers/s", grades)
    rate("levels searched", "levels/s", levels)
