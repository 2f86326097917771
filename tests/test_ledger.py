"""The ledger has every trained step, also over a full disk and a restart."""

from __future__ import annotations

import contextlib
import json

import pytest

from learner.tickets.ledger import Ledger


def steps(path):
    """Of the lines that can be read."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line)["step"])
    return found


@pytest.fixture
def full(tmp_path):
    """A ledger on a disk without a free byte."""
    path = tmp_path / "ledger.jsonl"
    path.symlink_to("/dev/full")
    return path


def test_what_a_full_disk_refuses_is_written_with_a_later_step(full):
    ledger = Ledger(full)
    ledger.enter(1, [10, 11])
    ledger.enter(2, [12])
    assert len(ledger.state()) == 2
    full.unlink()
    ledger.enter(3, [13])
    assert steps(full) == [1, 2, 3]
    assert ledger.state() == []


def test_a_learner_that_leaves_when_the_disk_has_room_again_leaves_no_hole(full):
    ledger = Ledger(full)
    ledger.enter(1, [10])
    full.unlink()
    assert ledger.state() == []  # the checkpoint of one that was asked to leave
    assert steps(full) == [1]


def test_a_learner_that_resumes_writes_what_the_one_before_could_not(full):
    before = Ledger(full)
    before.enter(1, [10])
    kept = json.loads(json.dumps(before.state()))
    full.unlink()
    full.write_text('{"step": 1, "tick')  # of the write that failed
    after = Ledger(full, kept)
    after.enter(2, [11])
    assert steps(full) == [1, 2]
