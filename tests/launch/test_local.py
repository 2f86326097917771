"""What launch/local.py says of a process that has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.local import failure
from launch.processes.children import Child


def ended(code: str) -> Child:
    process = subprocess.Popen([sys.executable, "-c", f"import os; {code}"])
    process.wait()
    return Child("learner", process)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_learner_that_was_killed_is_told_by_its_signal_with_what_to_do(tmp_path: Path, has_checkpoint: bool) -> None:
    """Nothing stands above the line: a killed process gives no reason."""
    if has_checkpoint:
        for step in (10, 20):
            (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
            (tmp_path / f"checkpoints/step_{step:08d}/meta.json").touch()
    line = failure(ended("os.kill(os.getpid(), 9)"), tmp_path)
    assert "learner was ended by SIGKILL" in line and "memory" in line and "above" not in line
    assert ("--learner.resume auto goes on from step_00000020" if has_checkpoint else "no checkpoint") in line


def test_a_learner_that_has_said_why_it_ends_is_not_explained_again(tmp_path: Path) -> None:
    assert failure(ended("os._exit(2)"), tmp_path) == "learner ended with exit code 2; its reason is above"
