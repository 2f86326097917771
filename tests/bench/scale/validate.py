"""Four short real runs at several `learner.max_staleness`, and what the simulation says of them from a fifth one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.engines.network import free_port
from tests.bench.scale.calibrate import loop_from, rows_of
from tests.bench.scale.sim_records import Loop
from tests.bench.scale.simulation import simulate

RECIPE, NAME = "launch/recipes/sokoban_tiny.toml", "sokoban_tiny"
BOUNDS = (0, 1, 2, 4)
CALIBRATED_AT = 2
GROUPS, IN_PLAY, MAX_BATCH = 16, 64, 64
STEPS, SKIP = 16, 6
SEEDS = 8  # simulations that are averaged
LIMIT_S = 3600.0
END_S = 30.0  # in which a run that is told to end has ended
TOLERANCE = 0.1


def play(folder: Path, name: str, bound: int, seed: int) -> Path:
    """One real run; its folder. RuntimeError if it fails."""
    address = f"tcp://127.0.0.1:{free_port()}"
    fields = {
        "run.dir": folder, "run.name": name, "run.seed": seed, "learner.bind": address, "actor.learner": address,
        "engine.port": free_port(), "engine.max_batch": MAX_BATCH, "actor.groups": IN_PLAY,
        "learner.groups_per_step": GROUPS, "learner.total_steps": STEPS, "learner.max_staleness": bound,
        "learner.checkpoint.every": 0, "learner.publish.verify_every": 0, "eval.samples": 0, "eval.greedy": "false",
        "record.every": 1, "record.groups": GROUPS,
    }  # fmt: skip
    arguments = [part for key, value in fields.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "launch/local.py", "--config", RECIPE, *arguments]
    with (folder / f"{name}.err").open("w") as errors:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            code = run.wait(LIMIT_S)
        finally:
            if run.poll() is None:  # it ends its learner, engine and actors itself
                run.terminate()
                with suppress(subprocess.TimeoutExpired):
                    run.wait(END_S)
                run.kill()  # nothing happens if it has ended
                run.wait()
    if code:
        raise RuntimeError(f"the run {name} ended with {code}; see {folder / name}.err")
    return folder / name


def measured(folder: Path) -> dict[str, float]:
    """Of the steps that are counted: turns a second, and the mean staleness of tokens."""
    rows = rows_of(folder)[SKIP:]
    seconds = sum(row["time/step_s"] for row in rows)
    return {
        "turns_per_s": float(sum(row["speed/turns_per_s"] * row["time/step_s"] for row in rows) / seconds),
        "staleness": float(sum(row["staleness/token/mean"] for row in rows) / len(rows)),
    }


def predicted(loop: Loop, bound: int) -> dict[str, float]:
    loop = replace(loop, max_staleness=bound)
    found = [simulate(loop, STEPS, skip=SKIP, seed=seed, ends=True) for seed in range(SEEDS)]
    return {
        "turns_per_s": sum(outcome.turns_per_s for outcome in found) / SEEDS,
        "staleness": sum(outcome.staleness for outcome in found) / SEEDS,
    }


def within(ratio: float | None) -> bool:
    return ratio is None or abs(ratio - 1) <= TOLERANCE


def compared(loop: Loop, runs: dict[int, Path]) -> dict[str, Any]:
    """Predicted, measured and their ratio by bound; null where nothing was measured (staleness at bound 0)."""
    settings: dict[str, Any] = {}
    for bound, folder in runs.items():
        said, seen = predicted(loop, bound), measured(folder)
        settings[str(bound)] = {
            name: {
                "predicted": round(said[name], 4),
                "measured": round(seen[name], 4),
                "ratio": round(said[name] / seen[name], 3) if seen[name] else None,
            }
            for name in seen
        }
    ratios = [value["ratio"] for setting in settings.values() for value in setting.values()]
    return {"max_staleness": settings, "within_tolerance": all(within(ratio) for ratio in ratios)}


def validate(folder: Path) -> dict[str, Any]:
    """Runs that `folder` holds already are not made again."""

    def run(name: str, bound: int, seed: int) -> Path:
        return folder / name if (folder / name / "result.json").exists() else play(folder, name, bound, seed)

    folder.mkdir(parents=True, exist_ok=True)
    calibration = run("calibration", CALIBRATED_AT, seed=1)
    loop = loop_from(calibration, SKIP, groups_per_step=GROUPS, groups_in_play=IN_PLAY, max_batch=MAX_BATCH)
    result = compared(loop, {bound: run(f"staleness_{bound}", bound, seed=2) for bound in BOUNDS})
    engine, publication = loop.engine, loop.publication
    return {
        "calibration": {
            "token_s": round(engine.token_s, 6), "request_s": round(engine.request_s, 6),
            "turn_s": round(engine.turn_s, 6), "step_s": round(loop.step_s.mean, 3),
            "publication_s": round(publication.send_s + publication.load_s, 3), "load_s": round(publication.load_s, 4),
        },
        **result,
    }  # fmt: skip
