"""Runs of small tasks for the benchmarks of this folder, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch.engines.network import free_port

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests/bench/mixtures/places.py"
RUN_S = 3000.0


def train(folder: Path, name: str, seed: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the recipe colour_tiny and these fields, unless it was done before; return the rows of its metrics."""
    if not (folder / name / "result.json").exists():
        address = f"tcp://127.0.0.1:{free_port()}"
        own = {"run.dir": str(folder), "run.name": name, "run.seed": seed, "engine.port": free_port()}
        fields = {**own, "learner.bind": address, "actor.learner": address, "record.every": 0, **fields}
        words = [w for k, v in fields.items() for w in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
        done = subprocess.run(
            [sys.executable, "launch/local.py", "--config", str(recipe(folder, fields)), *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def recipe(folder: Path, fields: dict[str, Any]) -> Path:
    """Return a recipe: colour_tiny's, without its environment if there are tasks."""
    text = (ROOT / "launch/recipes/colour_tiny.toml").read_text()
    if "tasks" in fields:
        text = text.replace('module = "envs.colour"\n', "")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("tasks.toml" if "tasks" in fields else "one.toml")
    path.write_text(text)
    return path


def held_out(rows: list[dict[str, Any]], metric: str = "eval/success") -> list[tuple[int, float]]:
    """Return (step, value) of each evaluation."""
    return [(row["step"], row[metric]) for row in rows if metric in row]


def newest_checkpoint(folder: Path, name: str) -> str:
    return str(sorted((folder / name / "checkpoints").glob("step_*"))[-1] / "hf")
