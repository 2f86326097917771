"""What `import pronk` gives to a program: the page's script, whose processes are real, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.engines.network import free_port

PACKAGE = Path("launch/package").resolve()
SCRIPT = Path("docs/examples/colour.py").resolve()
NEW = """
import pronk
run = pronk.RunFiles("here/colour_tiny")
rows = run.metrics()
assert run.metrics("arrow").num_rows == len(rows) and run.metrics("arrow")["step"].to_pylist()[0] == rows[0]["step"]
try:
    assert len(run.metrics("pandas")) == len(rows)
except ModuleNotFoundError as error:
    assert error.name == "pandas"
assert {"step", "evaluation", "id", "seen", "answers", "images", "reward", "success"} <= set(run.episodes()[0])
assert run.episodes("arrow").num_rows == len(run.episodes())
assert run.software["pronk"] == pronk.__version__ and run.recipe["run"]["name"] == "colour_tiny"
for form, folder in (("excel", "here/colour_tiny"), ("records", ".")):
    try:
        pronk.RunFiles(folder).metrics(form)
    except ValueError as error:
        print(error)
"""
WRONG = """
import pronk
for settings in ({"learner.total_steps": -1}, {"env.module": "nothing.py"}):
    try:
        pronk.train("colour_tiny", settings, show=False)
    except (ValueError, pronk.ProgramFailed) as error:
        print(type(error).__name__, error)
"""


def python(folder: Path, *words: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_script_of_the_page_trains_draws_shows_and_evaluates_and_its_run_can_be_read(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    settings = {
        **{"run.dir": "here", "learner.bind": address, "actor.learner": address, "engine.port": free_port()},
        **{"learner.total_steps": 2, "eval.samples": 8, "learner.resume": "never"},
    }
    shown = python(tmp_path, str(SCRIPT), json.dumps(settings))
    assert shown[0].startswith("here/colour_tiny {'success_before': ") and "'optimizer_steps': 2" in shown[0]
    assert any(line.startswith("answered: ") for line in shown)
    assert shown[-1].startswith("success 0.") and "95 % interval" in shown[-1]
    assert (tmp_path / "here/colour_tiny/success.png").stat().st_size > 1000
    refused = python(tmp_path, "-c", NEW)
    assert refused == [
        "form = 'excel': there are records, pandas and arrow",
        ". is no folder of a run: it has no recipe.json",
    ]


@pytest.mark.slow
def test_a_mistake_is_one_line_in_an_exception(tmp_path):
    first, second = python(tmp_path, "-c", WRONG)
    assert first.startswith("ConfigError ") and "learner.total_steps = '-1'" in first
    assert second.startswith("ProgramFailed ") and "nothing.py" in second
