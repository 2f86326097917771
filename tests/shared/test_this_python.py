"""A Python that cannot run Pronk is told so in one line, by whichever command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared import this_python
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    "command",
    [["launch/local.py", "--config", "colour_tiny"], ["launch/run.py", "colour_tiny"], ["-m", "envs.check"]],
    ids=" ".join,
)
def test_a_python_without_the_packages_gets_one_line_with_the_cure(command: list[str]) -> None:
    isolated = [sys._base_executable, "-S", *command]
    ended = subprocess.run(isolated, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: Pronk's packages are not in this Python (") and "make env" in line


def test_an_older_python_is_named_with_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_python, "NEEDS", (3, 99))
    assert "Pronk needs Python 3.99 or newer, and this is 3." in this_python.mistake()


def test_this_python_can_run_it() -> None:
    assert this_python.mistake() == ""
