"""What it costs that an agent plays: Sokoban trained by its own environment and by the agent of
docs/how-to/agent-sokoban.md, in turns:

    python -m tests.bench.agents [--steps 30] [--rounds 3] [--samples 0] [--section.key VALUE ...]
    python -m tests.bench.agents --actor          # without learner and engine: an actor alone

A round is a run of each kind with the same seed, one after the other; every second round begins with the agent.
`turns_per_s` is the median over the steps after the first tenth, `cpu_ms` what a turn takes of a core in all processes
of the run, their start included, `success` that of the trained model in the recipe's own environment, greedy, `load`
the machine's before and after the training. Without the package `openai` a stand-in plays. One line for each run; the
last line is one JSON object, where `ratio` is the agent's turns_per_s over the environment's, of each round. `--actor`
plays 128 boards with random answers, and tells the processor time of a turn in the actor's process, the agent's
included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from transformers import PreTrainedTokenizerFast

from actor.engine_pool import EnginePool
from actor.render import Renderer
from actor.worker import make_players
from envs import sokoban
from shared.engine.engine_api import EngineClient
from shared.types import Completion, VersionSpan
from shared.vision import VisionSpec
from tests.support.agent_examples import HAS_OPENAI, example_agent, small, tickets_of
from tests.support.runs import command, places

RECIPE = "launch/recipes/sokoban_tiny.toml"
PAGE = "docs/how-to/agent-sokoban.md"
KINDS = ("environment", "agent")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, with seeds of their own")
    parser.add_argument("--samples", type=int, default=0, help="held-out boards; 0: no success is measured")
    parser.add_argument("--actor", action="store_true")
    options, overrides = parser.parse_known_args()
    if options.actor:
        alone = {kind: actor_ms(kind) for kind in KINDS * 2}
        print(json.dumps({"benchmark": "agents", "openai": HAS_OPENAI, "actor_ms": alone}))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for seed in range(options.rounds):
        for kind in KINDS[:: -1 if seed % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                runs[kind].append(measured(kind, Path(folder), seed, options, overrides))
            print(f"{kind:12} seed {seed}  {runs[kind][-1]}", flush=True)
    means = {kind: {name: mean(done, name) for name in done[0] if name != "load"} for kind, done in runs.items()}
    pairs = zip(runs["environment"], runs["agent"], strict=True)
    ratio = [agent["turns_per_s"] / own["turns_per_s"] for own, agent in pairs]
    found = {"openai": HAS_OPENAI, "ratio": ratio, "mean_ratio": statistics.mean(ratio), **means, "runs": runs}
    print(json.dumps({"benchmark": "agents", "steps": options.steps, **found}))
    return 0


def measured(kind: str, folder: Path, seed: int, options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Train once; return the figures."""
    fields: dict[str, Any] = {"run.name": "run", "run.seed": seed, "learner.total_steps": options.steps}
    fields |= {"eval.samples": 0, "learner.checkpoint.every": 0}
    if kind == "agent":
        fields["rollout.agent"] = f"{example_agent(PAGE, folder)}:run"
    load, began = os.getloadavg()[0], cpu_s()
    run(command("local", [*places(folder, **fields), *overrides], RECIPE), folder)
    took, load_after = cpu_s() - began, os.getloadavg()[0]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/reward" in row]
    episodes = sum(row["batch/episodes"] for row in steps)
    turns = sum(row["rollout/turns"] * row["batch/episodes"] for row in steps)
    figures = {
        "turns_per_s": statistics.median(row["speed/turns_per_s"] for row in steps[len(steps) // 10 :]),
        "cpu_ms": 1e3 * took / turns,
        "turns": turns / episodes,
        "load": (load, load_after),
    }
    if options.samples:
        (checkpoint,) = (folder / "run" / "checkpoints").glob("step_*")
        played = ["--model", str(checkpoint), "--samples", str(options.samples), "--greedy"]
        told = run(command("evaluate", [*played, *places(folder)], RECIPE), folder)
        figures["success"] = json.loads(told.splitlines()[-1])["success"]
    return figures


class RandomAnswers(EngineClient):
    """An engine that answers any request with random moves after 50 ms."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__("http://random:1")
        texts = [sokoban.random_response(Random(seed)) for seed in range(200)]
        self._answers = [renderer.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self._end, self._count = renderer.end_id, 0

    async def generate(self, *_: Any, **__: Any) -> Completion:
        await asyncio.sleep(0.05)
        self._count += 1
        ids = (*self._answers[self._count % len(self._answers)], self._end)
        return Completion(ids, (-0.5,) * len(ids), (VersionSpan(1, 0, len(ids)),), "stop")


def actor_ms(kind: str, boards: int = 128, at_once: int = 64) -> float:
    """Milliseconds of processor time that a turn takes in the actor's process."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)  # where the stand-in is
        recipe = small(
            "sokoban_tiny", rollout__agent=f"{example_agent(PAGE, Path(folder))}:run" if kind == "agent" else ""
        )
        vision = VisionSpec.load(recipe.model.path)
        renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(recipe.model.path), vision)
        tickets = tickets_of(recipe, boards)

        async def play() -> float:
            players, _ = make_players(recipe, renderer, EnginePool([RandomAnswers(renderer)]))
            await asyncio.gather(*(players.play(ticket) for ticket in tickets[:4]))  # what is made once
            began, turns = time.process_time(), 0
            for first in range(0, boards, at_once):
                played = await asyncio.gather(*map(players.play, tickets[first : first + at_once]))
                turns += sum(len(each.turns) for each in played)
            took = time.process_time() - began
            await players.close(1.0)
            return 1e3 * took / turns

        return asyncio.run(play())


def run(words: list[str], folder: Path) -> str:
    """Run a command to its end; return what it has printed."""
    env = os.environ | ({} if HAS_OPENAI else {"PYTHONPATH": str(folder)})
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def cpu_s() -> float:
    """Seconds of a core that the processes have taken which this one has started, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def mean(done: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(each[name] for each in done)


if __name__ == "__main__":
    sys.exit(main())
