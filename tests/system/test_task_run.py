"""A task with one command, really run: without a GPU, with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envs.geometry.triangles import rows
from envs.row_files import write_rows
from tests.support.runs import finished, metrics, places

SHORT = {"learner.total_steps": 2, "eval.samples": 4}
ON_CPU = {
    "learner.device": "cpu",
    "engine.kind": "embedded",
    "engine.device": "cpu",
    "engine.count": 1,
    "model.dtype": "float32",
}
SMALL = {"model.max_context": 1024, "env.max_tokens": 16, "env.turn_tokens": 16, "learner.groups_per_step": 2}
FEW = {"actor.groups": 4}  # places of an actor for so few groups


def run(tmp_path: Path, *words: object, **fields: object) -> list[str]:
    return [sys.executable, "launch/run.py", *map(str, words), *places(tmp_path, **fields)]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_small_task_trains_here_with_one_command(tmp_path: Path) -> None:
    ended = finished(run(tmp_path, "colour_tiny", **SHORT))
    lines = ended.stdout.splitlines()
    assert "no GPU" in ended.stdout and "64 episodes" in ended.stdout
    assert json.loads(lines[-1])["optimizer_steps"] == 2
    assert len([row for row in metrics(tmp_path) if "optim/grad_norm" in row]) == 2
    assert (tmp_path / "colour_tiny" / "recipe.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_task_takes_a_users_own_file_and_model_and_trains_on_them(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    write_rows(file, rows(8, "train"))
    own = ["geo3k", "--dataset", file, "--model", "launch/models/geo3k_tiny", "--folder", tmp_path]
    fields = {**SHORT, **ON_CPU, **SMALL, **FEW, "eval.every_steps": 0, "eval.samples": 1}
    ended = finished(run(tmp_path, *own, **fields))
    assert "7 to train on, 1 held out" in ended.stdout
    assert json.loads(ended.stdout.splitlines()[-1])["optimizer_steps"] == 2
    assert len([*(tmp_path / "data").glob("geo3k-own-*/train.parquet")]) == 1
    assert (tmp_path / "geo3k_geo3k_tiny" / "recipe.json").exists()


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    words = run(
        tmp_path, "geo3k", "--model", "launch/models/geo3k_tiny", "--folder", tmp_path, **ON_CPU, **SMALL, **FEW
    )
    code = f"import os, sys; os.environ['HF_ENDPOINT'] = 'http://127.0.0.1:9'; os.execv(sys.executable, {words!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 2 and "dataset 'chenhegu/geo3k_imgurl' cannot be downloaded" in line
    assert not (tmp_path / "geo3k_geo3k_tiny").exists()
