"""Folders that hold a run with recordings: one for all tests, and one for a test to damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.dashboard.recorded_run import make_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that no test changes."""
    folder = tmp_path_factory.mktemp("whole")
    make_run(folder / "sokoban", steps=20, recorded=(10,), groups=2)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a run that the test may damage."""
    make_run(tmp_path / "sokoban", steps=5, recorded=(10,), groups=2)
    return tmp_path
