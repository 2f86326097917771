"""What recording costs a run, in the CPU seconds that all its processes take for a turn.

    python tests/bench/recorded_turns.py [--config launch/recipes/sokoban_tiny.toml] [--steps 20] [--pairs 1]
        [--section.key VALUE ...]

Plays runs of launch/local.py by turns with the recipe's recordings and with none. CPU seconds of a run are those of all
its processes between its first step and its last, which other work on the machine disturbs far less than its clock.
The last line is one JSON object: of each run `cpu_ms` and `turns_per_s`; `cost` is what recorded runs take more, as a
share (the noise of two runs is in it), and `share` the part of a recorded run's CPU seconds in which its recorder's
thread worked, measured in the run itself; `notes_share` is the same of what actors write down of each turn, recorded or
not, as a microbenchmark tells it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any

from actor.episode import TurnTimings
from envs.loader import load_env
from launch.task_samples import training_samples
from shared.config.recipe import load_recipe
from tests.support.runs import command, metrics, places

TICKS = os.sysconf("SC_CLK_TCK")
RECORDED: dict[str, int] = {}  # as the recipe says
NOT_RECORDED = {"record.every": 0}
NAME, LIMIT_S = "measured", 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="launch/recipes/sokoban_tiny.toml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=1)
    options, overrides = parser.parse_known_args()
    found: dict[str, list[dict[str, float]]] = {"recorded": [], "not_recorded": []}
    for pair in range(options.pairs):
        kinds = [("recorded", RECORDED), ("not_recorded", NOT_RECORDED)]
        for kind, fields in kinds if pair % 2 == 0 else reversed(kinds):
            found[kind].append(measured(options.config, options.steps, fields, overrides))
            print(kind, json.dumps(found[kind][-1]), file=sys.stderr, flush=True)
    cpu_ms = {kind: statistics.median(run["cpu_ms"] for run in runs) for kind, runs in found.items()}
    note_ms = note(options.config, overrides)
    result = {
        "cost": round(cpu_ms["recorded"] / cpu_ms["not_recorded"] - 1, 4),
        "share": round(statistics.median(run["share"] for run in found["recorded"]), 5),
        "notes_share": round(note_ms / cpu_ms["not_recorded"], 5),
    }
    print(json.dumps({**result, **found, "note_ms": round(note_ms, 4), "load": os.getloadavg()[0]}))
    return 0


def measured(config: str, steps: int, fields: dict[str, int], overrides: list[str]) -> dict[str, float]:
    """One run, which is stopped after so many steps: CPU milliseconds of a turn, and turns, from the second step on."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"run.name": NAME, "learner.total_steps": steps + 2, "eval.samples": 0, **fields}
        arguments = command("local", [*places(Path(folder), **own), *overrides], config)
        log = Path(folder) / "said.log"
        with log.open("wb") as output:
            process = subprocess.Popen(arguments, stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
            try:
                first, used = watched(process, Path(folder), 1)
                last, used_then = watched(process, Path(folder), steps)
            finally:
                process.terminate()
                process.wait(60)
        rows = metrics(Path(folder), NAME)[first:last]
        turns = sum(row["rollout/turns"] * row["batch/episodes"] for row in rows)
        seconds = sum(row["time/step_s"] for row in rows)
        recorder = rows[-1].get("record/seconds", 0.0)  # of its whole life, which ends with the last row
        cpu = used_then - used
        values = {"cpu_ms": 1000 * cpu / turns, "turns_per_s": turns / seconds, "share": recorder / cpu, "turns": turns}
        return {name: round(value, 5) for name, value in values.items()}


def watched(process: subprocess.Popen[bytes], folder: Path, step: int) -> tuple[int, float]:
    """When the step's row is there: how many rows there are, and CPU seconds of the processes that live then."""
    path, deadline = folder / NAME / "metrics.jsonl", time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        rows = path.read_text().count("\n") if path.exists() else 0
        if rows >= step:
            return rows, cpu_seconds(process.pid)
        time.sleep(0.05)
    raise SystemExit(f"the run ended before step {step}: {(folder / 'said.log').read_text()[-2000:]}")


def cpu_seconds(session: int) -> float:
    """Of all processes of a session, with their children that have ended."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == session:
            found += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return found / TICKS


def note(config: str, overrides: list[str], turns: int = 8, times: int = 200) -> float:
    """CPU milliseconds in which an actor writes down one turn, with an info of the recipe's environment."""
    recipe = load_recipe(config, overrides)
    env: Any = load_env(recipe.env.module)(sample=training_samples(recipe).sample(0), args=recipe.env.args)
    env.reset()
    _, _, info = env.step("<answer>up, up, up</answer>")
    began = time.process_time()
    for _ in range(times):
        notes = TurnTimings()
        for _ in range(turns):
            notes.record_answer(0.0, 1.0)
            notes.record_turn()
            notes.timed(lambda: None)()
            notes.record_call(0.0, 1.0)
        notes.notes([info] * turns)
    return 1000 * (time.process_time() - began) / (times * turns)


if __name__ == "__main__":
    sys.exit(main())
