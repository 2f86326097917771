"""The README tells the truth: its example runs, its table and its list of files are complete."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from envs.check import main as check_env
from shared.config import field_table
from tests.support.runs import local, metrics, places

README = Path("README.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found
    path = tmp_path / "sums.py"
    path.write_text(found.group(1))
    return path


def test_the_table_of_fields_is_the_recipes() -> None:
    assert field_table() in README


def test_every_file_is_listed_in_one_line() -> None:
    packages = ("shared", "envs", "actor", "learner", "kernels", "launch")
    files = [path for package in packages for path in Path(package).rglob("*.py") if path.name != "__init__.py"]
    files = [path for path in files if "stand_ins" not in path.parts]  # of SGLang's environment, no modules of ours
    assert files
    assert [str(path) for path in files if f"- `{path}`: " not in README] == []


def test_the_example_environment_keeps_the_contract(example: Path) -> None:
    assert check_env([str(example)]) == 0


@pytest.mark.slow
def test_the_example_environment_is_trained_on_by_naming_its_file(example: Path, tmp_path: Path) -> None:
    fields = {"env.module": example, "learner.total_steps": 2, "eval.samples": 8}
    run = subprocess.run(local(places(tmp_path, **fields)), capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout)["optimizer_steps"] == 2
    assert [row["rollout/turns"] for row in metrics(tmp_path) if "rollout/turns" in row] == [1.0, 1.0]
