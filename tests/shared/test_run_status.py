"""What a run is doing and how it ended, in a file that others read while it is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shared import run_status
from shared.run_status import STATUS, RunStatus, StatusFile, read_status


def test_a_phase_is_read_with_how_far_it_is_and_since_when(tmp_path: Path) -> None:
    before = time.time()
    file = StatusFile(tmp_path)
    assert read_status(tmp_path) is None
    file.enter("evaluation before", 0, 800)
    status = read_status(tmp_path)
    assert status is not None and status.in_words() == "evaluation before: 0 of 800"
    assert before <= status.since <= time.time() and not status.ended


def test_a_phase_keeps_its_beginning_and_is_not_written_more_than_once_a_second(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_status, "EVERY_S", 1000.0)
    file = StatusFile(tmp_path)
    file.enter("evaluation", 0, 9)
    first = read_status(tmp_path)
    file.enter("evaluation", 1, 9)
    assert read_status(tmp_path) == first
    monkeypatch.setattr(run_status, "EVERY_S", 0.0)
    file.enter("evaluation", 2, 9)
    now = read_status(tmp_path)
    assert first is not None and now is not None and (now.done, now.since) == (2, first.since)


def test_an_end_says_how_and_why_in_one_line(tmp_path: Path) -> None:
    file = StatusFile(tmp_path)
    file.enter("training")
    file.end("failed", "40 of the last 40\nepisodes failed")
    status = read_status(tmp_path)
    assert status is not None and (status.ended, status.reason) == ("failed", "40 of the last 40 episodes failed")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"phase": 1}', '{"phase": "a", "since": "x"}', "\x00" * 50])
def test_a_damaged_file_is_no_status(tmp_path: Path, content: str) -> None:
    (tmp_path / STATUS).write_text(content)
    assert read_status(tmp_path) is None


def test_a_folder_that_cannot_be_written_costs_the_status_alone(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "gone")
    file.enter("training")
    file.end("complete")
    assert not os.listdir(tmp_path) and RunStatus("training", 0.0).in_words() == "training"
