"""What it costs to run environments in processes of their own rather than in threads:

python tests/bench/isolation.py [--steps 3000] [--open 32]

Sokoban is stepped through the actor's two threads as in a run, in text and with pictures (8x8 at 32 px, each made a
PNG), `--open` episodes at once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actor.env_threads import EnvThreads
from actor.isolation.fork_server import ForkConfig
from actor.isolation.processes import RemoteEnv, UserProcesses
from envs import sokoban
from shared.rgb_images import as_png
from shared.types import Sample

ANSWERS = [sokoban.random_response(Random(seed)) for seed in range(1000)]
TASKS: dict[str, dict[str, Any]] = {
    "text": {"render_mode": "text", "max_steps": 10**9},
    "pictures": {"pixels_per_cell": 32, "grid_size": [8, 8], "max_steps": 10**9},
}


class Here:
    """An environment in this process; its pictures are made PNGs as the renderer does."""

    def __init__(self, sample: Sample, args: dict[str, Any]) -> None:
        self._env = sokoban.build_env(sample, args)

    def reset(self) -> None:
        self._look(self._env.reset()[0])

    def step(self, answer: str) -> None:
        observation, done, _ = self._env.step(answer)
        self._look(observation)
        if done:
            self._env.reset()

    def _look(self, observation: dict[str, Any]) -> None:
        for item in self._env.format_observation(observation)["content"]:
            if item["type"] == "image":
                as_png(item["image"])

    def close(self) -> None:
        self._env.close()


class There(RemoteEnv):
    """An environment in a user process, which begins anew when it is over."""

    def step(self, response_text: str) -> Any:
        if super().step(response_text)[1]:
            self.reset()


async def steps(make: Callable[[Sample], Any], threads: EnvThreads, num_open: int, num_steps: int) -> dict[str, float]:
    """So many steps of `num_open` environments at once: steps a second, the processor's ms for a step here and in the
    user processes, and the median ms of a step alone."""
    envs = [make(Sample(str(seed), metadata={"seed": seed})) for seed in range(num_open)]
    for env in envs:
        await threads.run(env.reset, 60.0)
    pids = [env._process.pid for env in envs if isinstance(env, There) and env._process]
    answers = iter(ANSWERS[number % 1000] for number in range(num_steps))

    async def play(env: Any) -> None:
        for answer in answers:
            await threads.run(partial(env.step, answer), 600.0)

    began, here, there = time.perf_counter(), time.process_time(), sum(map(cpu_s, pids))
    await asyncio.gather(*map(play, envs))
    found = {
        "steps/s": num_steps / (time.perf_counter() - began),
        "CPU ms here": 1000 * (time.process_time() - here) / num_steps,
        "CPU ms there": 1000 * (sum(map(cpu_s, pids)) - there) / num_steps,
    }
    took = []
    for answer in ANSWERS[:300]:
        began = time.perf_counter()
        await threads.run(partial(envs[0].step, answer), 60.0)
        took.append(1000 * (time.perf_counter() - began))
    for env in envs:
        env.close()
    found["median ms of one alone"] = statistics.median(took)
    return {name: round(value, 3) for name, value in found.items()}


def cpu_s(pid: int) -> float:
    """What a process has computed so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def median_ms(run: Callable[[], None], times: int) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        took.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(took), 3)


def episodes(processes: UserProcesses) -> dict[str, float]:
    """Milliseconds to begin and end an episode: in a process that is forked for it, and in one that is used again."""
    sample, forked = Sample("s", metadata={"seed": 1}), []

    def begin_anew() -> None:
        forked.append(RemoteEnv(processes, sample, 60.0))
        forked[-1].reset()

    def again() -> None:
        env = RemoteEnv(processes, sample, 60.0)
        env.reset()
        env.close()

    found = {"begin in a new process, ms": median_ms(begin_anew, 20)}
    megabytes = [private_mb(env._process.pid) for env in forked if env._process is not None]
    for env in forked:
        env.close()
    found["begin and end in a used process, ms"] = median_ms(again, 50)
    return found | {"private memory of a process, MiB": round(statistics.median(megabytes), 1)}


def private_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--open", type=int, default=32)
    options = parser.parse_args()
    found: dict[str, Any] = {"open": options.open}
    for name, args in TASKS.items():
        processes, threads = UserProcesses(ForkConfig("envs.sokoban", args=args)), EnvThreads(2)
        makers: dict[str, Callable[[Sample], Any]] = {
            "thread": lambda sample, args=args: Here(sample, args),
            "process": lambda sample, processes=processes: There(processes, sample, 60.0),
        }
        for mode, make in makers.items():
            found[f"{name}, {mode}"] = asyncio.run(steps(make, threads, options.open, options.steps))
            print(f"{name}, {mode}: {found[f'{name}, {mode}']}", flush=True)
        if name == "text":
            found |= episodes(processes)
        threads.close()
        processes.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
