"""The ledger has every trained step, also over a full disk and a restart."""

from __future__ import annotations

import json
import re

import pytest

from learner.tickets.ledger import Ledger


def steps(path):
    """Of the lines that can be read."""
    return [int(step) for step in re.findall(r'^\{"step": (\d+), "tickets": .*\}$', path.read_text(), re.MULTILINE)]


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
    assert ledger.state() == []  # the checkpoint of one that was asked to leave
    assert steps(full) == [1, 2]
    ledger.enter(3, [13])
    assert steps(full) == [1, 2, 3] and ledger.state() == []


def test_a_learner_that_resumes_writes_what_the_one_before_could_not(full):
    before = Ledger(full)
    before.enter(1, [10])
    kept = json.loads(json.dumps(before.state()))
    full.unlink()
    full.write_text('{"step": 1, "tick')  # of the write that failed
    after = Ledger(full, kept)
    after.enter(2, [11])
    assert steps(full) == [1, 2]
