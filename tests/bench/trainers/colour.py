"""Wall time to 0.9 of answers right on the colour task: Pronk beside TRL's GRPOTrainer with its own generation.

    pip install --target PEERS --no-deps trl accelerate datasets ...         # whatever `import trl` lacks
    python -m tests.bench.trainers.colour --peers PEERS [--seeds 3] [--steps 80]
        [--pronk "learner.groups_per_step=8 learner.publish.verify_every=10"] [--trl "learning_rate=5e-4"]

Same model (launch/models/colour_tiny), same questions, same reward, groups of 4, 16 of them a step where a variant does
not say otherwise, AdamW with the same betas, on this machine alone, in turns. Each `--pronk` is a variant with settings
of its recipe, each `--trl` one with settings of GRPOConfig, or `groups`, those of a step; one of each without any.

A question is new in each step, and so the share of right answers in a step is that on questions never trained on; 0.9
is reached where the mean of three steps is. Two clocks: from the command on, and from the start of training (of Pronk,
when the first ticket is issued). Pronk's step counts when it has been trained on, TRL's when its rewards are known.
Each then answers 200 held-out questions, outside of the clock. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from launch.plots.curve_data import read_run
from tests.support.runs import finished, local, places

HEIGHT, WINDOW = 0.9, 3
LIMIT_S = 1800.0
HELD_OUT = 200


class Step(NamedTuple):
    of_command: float  # seconds
    of_training: float
    success: float


class Outcome(NamedTuple):
    steps: list[Step]
    held_out: float


def reached(steps: Sequence[Step]) -> Step | None:
    """The first step at which the mean of the last WINDOW is HEIGHT."""
    for end in range(WINDOW, len(steps) + 1):
        if statistics.mean(step.success for step in steps[end - WINDOW : end]) >= HEIGHT:
            return steps[end - 1]
    return None


def settings_of(words: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words.split())


def play_pronk(variant: str, seed: int, steps: int, _: str) -> Outcome:
    fields: dict[str, Any] = {"run.seed": seed, "data.first_seed": 1_000_000 * seed, "learner.total_steps": steps}
    fields |= {"learner.checkpoint.every": 0, "eval.samples": HELD_OUT, "eval.before": False} | settings_of(variant)
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        done = finished(local(places(Path(folder), **fields)), timeout_s=LIMIT_S)
        run = read_run(Path(folder) / "colour_tiny")
        minutes, success = run.series("rollout/success", "minutes"), run.series("rollout/success", "steps")
    found = zip(run.steps, minutes.x.tolist(), success.y.tolist(), strict=True)
    rows = [Step(row["time"] - began, 60 * minute, share) for row, minute, share in found]
    return Outcome(rows, json.loads(done.stdout.splitlines()[-1])["success_after"])


def play_trl(variant: str, seed: int, steps: int, peers: str) -> Outcome:
    command = [sys.executable, "-m", "tests.bench.trainers.trl_colour", "--peers", peers]
    command += ["--seed", str(seed), "--steps", str(steps), "--set", *variant.split()]
    began, rows, held_out = time.monotonic(), [], 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        for line in process.stdout:
            told = json.loads(line)
            if "held_out" in told:
                held_out = told["held_out"]
            else:
                rows.append(Step(time.monotonic() - began, told["seconds"], told["success"]))
        code = process.wait(LIMIT_S)
        limit.cancel()
        if code:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {said.read()[-2000:]}")
    return Outcome(rows, held_out)


def summary(outcome: Outcome) -> dict[str, Any]:
    found = reached(outcome.steps)
    seconds = (
        None if found is None else {"command": round(found.of_command, 1), "training": round(found.of_training, 1)}
    )
    spent = outcome.steps[-1].of_training - outcome.steps[0].of_training
    return {
        "seconds_to_0.9": seconds,
        "steps_to_0.9": None if found is None else outcome.steps.index(found) + 1,
        "seconds_a_step": round(spent / max(len(outcome.steps) - 1, 1), 2),
        "held_out": outcome.held_out,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="a folder with TRL and what it needs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pronk", action="append", default=[], help="a variant: KEY=VALUE ... of the recipe")
    parser.add_argument("--trl", action="append", default=[], help="a variant: KEY=VALUE ... of GRPOConfig, or groups")
    options = parser.parse_args()
    if not options.pronk and not options.trl:
        options.pronk = options.trl = [""]
    sides = [("pronk", words, play_pronk) for words in options.pronk]
    sides += [("trl", words, play_trl) for words in options.trl]
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for name, words, play in sides:
            result = summary(play(words, seed, options.steps, options.peers))
            found.setdefault(f"{name} {words}".strip(), []).append(result)
            print(name, words, seed, json.dumps(result), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "colour", "steps": options.steps, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
