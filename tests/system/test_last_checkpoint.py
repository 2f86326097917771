"""A run whose final weights are nowhere does not end as if all were well."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import local, places

pytestmark = pytest.mark.slow
FILE_BYTES = 300_000  # less than a checkpoint's largest file


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


def test_a_run_whose_last_checkpoint_is_not_written_says_so_in_its_last_line_and_fails(tmp_path: Path) -> None:
    fields = {"learner.total_steps": 2, "eval.samples": 0, "record.every": 0}
    ended = subprocess.run(
        local(places(tmp_path, **fields)), capture_output=True, text=True, timeout=250, preexec_fn=limited
    )
    assert ended.returncode != 0
    assert "checkpoint step_00000002 is not written, and there is no other one: " in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the run's steps are made, but its final weights are not written: ")
    assert "there is no checkpoint" in line and "Traceback" not in ended.stderr
    status = json.loads((tmp_path / "colour_tiny" / "status.json").read_text())
    assert status["ended"] == "failed" and "final weights are not written" in status["reason"]
