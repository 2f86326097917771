"""A model that is taught by another one, on its own episodes, without any reward."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.demonstrated import colour_rows, write
from tests.support.runs import LEARNING_S, RECIPE, command, finished, metrics, places


@pytest.mark.learning
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_colour_model_reaches_its_teacher_without_any_reward(tmp_path: Path, direction: str) -> None:
    data = write(tmp_path / "colours.jsonl", colour_rows(64))
    shown = {"run.name": "teacher", "eval.samples": 0, "learner.optimizer.lr": 3e-3}
    words = ["--config", RECIPE, "--data", str(data), "--epochs", "30", *places(tmp_path, **shown)]
    teacher = json.loads(finished([sys.executable, "launch/sft.py", *words]).stdout.splitlines()[-1])["model"]
    fields = {"objective.teacher": teacher, "objective.teacher_kl": direction, "objective.reward_weight": 0.0}
    own = {f"learner.{name}": value for name, value in fields.items()} | {"eval.samples": 200}
    result = json.loads(
        finished(command("local", places(tmp_path, **own)), timeout_s=LEARNING_S).stdout.splitlines()[-1]
    )
    assert 0.1 < result["success_before"] < 0.5
    assert result["success_after"] >= 0.9
    rows = [row for row in metrics(tmp_path) if "teacher/kl" in row]
    assert len(rows) == 40 and rows[-1]["teacher/kl"] < 0.2 * rows[0]["teacher/kl"]
