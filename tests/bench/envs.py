"""Speed of environments and rewards on one core, and the longest stall of an actor's event loop with 64 episodes:

python tests/bench/envs.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from transformers import AutoTokenizer

from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits
from actor.render import Renderer
from actor.rewards import EnvReward
from actor.rollout import Player
from actor.worker import keep_collections_short
from envs import geo3k_multi_turn, sokoban
from envs.boards.board_images import png
from envs.boards.generate import BoardSpec, make_board
from envs.boards.solver import solve
from envs.math_reward import grade
from envs.sokoban import build_env, random_response
from envs.sokoban_data import read_boards
from shared.engine.engine_api import EngineClient
from shared.types import Completion, Sample, Sampling, Ticket, VersionSpan
from shared.vision import VisionSpec

MODEL = ROOT / "launch/models/sokoban_tiny"
EPISODES = 64
TURN_S = 0.1
FOUND: dict[str, float] = {}
ANSWERS = [random_response(Random(seed)) for seed in range(1000)]


def rate(name: str, unit: str, run: Callable[[], int]) -> None:
    """Print how many things `run` (which returns their number) did a second."""
    started = time.perf_counter()
    count = run()
    FOUND[f"{name}, {unit}"] = round(count / (time.perf_counter() - started), 1)
    print(f"{name:32} {FOUND[f'{name}, {unit}']:12,.0f} {unit}")


def moves(turns: int, **args: Any) -> int:
    """Plays Sokoban; with images, each is written as a PNG. Returns the number of moves."""
    env, count = build_env(Sample("x", metadata={"seed": 1}), args), 0
    for turn in range(turns):
        observation, done, info = env.step(ANSWERS[turn % 1000])
        for image in observation.get("multi_modal_data", {}).get("image", []):
            png(image)
        count += len(info["parsed_actions"])
        if done:
            env.reset()
    return count


def boards() -> int:
    for seed in range(1000):
        make_board(seed, BoardSpec())
    return 1000


def grades(path: Path) -> int:
    """Grades the project's own cases; notes the share graded rightly and the milliseconds that a case takes."""
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    took, right = [], 0
    grade(r"\boxed{x+1}", "1+x")  # starts the process
    for case in cases:
        started = time.perf_counter()
        right += (grade(rf"\boxed{{{case['answer']}}}", case["label"]) == 1.0) == case["equal"]
        took.append(1000 * (time.perf_counter() - started))
    took.sort()
    FOUND["graded rightly"] = right / len(cases)
    for name, share in (("median", 50), ("p99", 99)):
        FOUND[f"grading, {name}, ms"] = round(took[len(took) * share // 100], 2)
    return len(cases)


def levels() -> int:
    found = read_boards(ROOT / "tests/data/boxoban/medium_valid_000.txt").boards[:200]
    unsolved = sum(solve(board, max_nodes=20_000) is None for board in found)
    FOUND["Boxoban levels solved within 20,000 positions, %"] = 100 * (1 - unsolved / len(found))
    return len(found)


class Answering(EngineClient):
    """Answers each turn after TURN_S, without any model: what remains is the actor's own work."""

    def __init__(self, tokenizer: Any, answers: list[str]) -> None:
        super().__init__("http://nowhere:1")
        self._answers = [tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False) for answer in answers]
        self._rng = Random(0)

    async def generate(self, *_: Any, **__: Any) -> Completion:
        await asyncio.sleep(TURN_S * self._rng.uniform(0.5, 1.5))
        ids = self._rng.choice(self._answers)
        return Completion(tuple(ids), (-1.0,) * len(ids), (VersionSpan(0, 0, len(ids)),), "stop")


async def longest_stall(module: Any, args: dict[str, Any], answers: list[str]) -> tuple[float, float]:
    """Milliseconds by which a timer of the loop was late at most, and turns a second, while EPISODES are played."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    renderer = Renderer(tokenizer, VisionSpec.load(MODEL))
    threads, engines = EnvThreads(2), EnginePool([Answering(tokenizer, answers)])
    reward_function = EnvReward(module.episode_reward, threads, 30.0)
    limits = EpisodeLimits(max_turns=8, max_tokens=4096, max_context=8192)
    player = Player(lambda sample: module.build_env(sample, args), renderer, engines, limits, threads, reward_function)
    samples = [Sample(str(seed), metadata={"seed": seed}) for seed in range(EPISODES)]
    started = time.perf_counter()
    games = [asyncio.create_task(player.play(Ticket("t", s, 1, 0, Sampling(), 60.0))) for s in samples]
    worst = 0.0
    while not all(game.done() for game in games):
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - before - 0.001)
    turns = sum(len(game.result().turns) for game in games)
    threads.close()
    return 1000 * worst, turns / (time.perf_counter() - started)


def stalls() -> None:
    boards = {"pixels_per_cell": 32, "num_boxes": 2, "grid_size": [8, 8], "progress_reward": 0.1}
    call = '<tool_call>{"name": "calc_score", "arguments": {"answer": "\\\\frac{\\\\sqrt{3}}{x+1}"}}</tool_call>'
    tasks: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
        "sokoban": (sokoban, boards, ANSWERS[:50]),
        "geo3k_multi_turn": (geo3k_multi_turn, {"max_turns": 8}, [call, r"\boxed{x+1}"]),
    }
    keep_collections_short()
    for name, (module, args, answers) in tasks.items():
        worst, turns = asyncio.run(longest_stall(module, args, answers))
        FOUND[f"{name}: longest stall of the loop, ms"] = round(worst, 1)
        FOUND[f"{name}: turns/s of {EPISODES} episodes"] = round(turns, 1)
        print(f"{name + ', longest stall':32} {worst:12.1f} ms, {turns:.0f} turns/s")


if __name__ == "__main__":
    rate("Sokoban, text", "moves/s", lambda: moves(10_000, render_mode="text", max_steps=10**9))
    rate("Sokoban, 6x6 at 32 px, with PNG", "moves/s", lambda: moves(2000, pixels_per_cell=32))
    rate("boards made and solved", "boards/s", boards)
    rate("answers graded", "answers/s", lambda: grades(ROOT / "tests/data/math_cases.jsonl"))
    rate("levels searched", "levels/s", levels)
    stalls()
    print(json.dumps(FOUND))
