"""What a process that Pronk starts gets from the one that starts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch.processes.children import ROOT, start


def test_a_process_imports_the_repositorys_modules_and_those_that_the_user_has_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code = "import sys, of_the_user, shared.config; sys.exit(shared.config.__file__ != sys.argv[1])"
    child = start("child", [sys.executable, "-P", "-c", code, str(ROOT / "shared/config.py")])
    assert child.process.wait(timeout=60) == 0
