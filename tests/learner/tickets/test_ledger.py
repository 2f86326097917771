"""The ledger has every trained step, also over a full disk and a restart."""

from __future__ import annotations

import json
import os
import re
from threading import Event
from types import SimpleNamespace

import pytest

from learner.coordinator import MainCoordinator
from learner.recording.recorder import Recorder
from learner.tickets.ledger import Ledger
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RunConfig
from shared.families.registry import FAMILIES
from shared.types import Group
from shared.vision import VisionSpec
from tests.support.wires import episode


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
    ledger.enter(1, [10, 11], "0-p")
    ledger.enter(2, [12], "0-p")
    assert len(ledger.state()) == 2
    full.unlink()
    assert ledger.state() == []  # the checkpoint of one that was asked to leave
    assert steps(full) == [1, 2]
    ledger.enter(3, [13], "0-p")
    assert steps(full) == [1, 2, 3] and ledger.state() == []


def test_a_learner_that_resumes_writes_what_the_one_before_could_not(full):
    before = Ledger(full)
    before.enter(1, [10], "0-p")
    kept = json.loads(json.dumps(before.state()))
    full.unlink()
    full.write_text('{"step": 1, "tick')  # of the write that failed
    after = Ledger(full, kept)
    after.enter(2, [11], "0-p")
    assert steps(full) == [1, 2]


def test_a_line_that_a_kill_has_cut_off_does_not_take_the_next_one_with_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(path).enter(1, [10], "0-p")
    path.write_text(path.read_text() + '{"step": 2, "tick')
    resumed = Ledger(path)
    resumed.enter(2, [11], "0-p")
    resumed.enter(3, [12], "0-p")
    assert steps(path) == [1, 2, 3]
    assert path.read_text().count("\n") == 4


def test_what_a_checkpoint_does_not_hold_is_on_the_disk_for_certain(tmp_path, monkeypatch):
    """A machine without power forgets what was written and not synced."""
    synced = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (sync(file), synced.append(os.fstat(file).st_size)))
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.enter(1, [10], "0-p")
    assert ledger.state() == [] and synced == [path.stat().st_size]
    ledger.enter(2, [11], "0-p")

    def broken(_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", broken)
    kept = ledger.state()
    assert [json.loads(line)["step"] for line in kept] == [2]
    path.write_bytes(path.read_bytes()[: synced[0]])
    monkeypatch.setattr(os, "fsync", sync)
    assert Ledger(path, kept).state() == [] and steps(path) == [1, 2]


def test_a_group_is_acknowledged_only_when_it_is_in_the_ledger(tmp_path):
    """Whoever is acknowledged forgets the group; the ledger must not wait for a disk meanwhile."""
    recipe = Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="e"), run=RunConfig(dir=str(tmp_path), name="r"))
    seen = []
    ticket_server = SimpleNamespace(
        process_id="p", commit=lambda: seen.append(steps(tmp_path / "r" / "ledger.jsonl")), metrics=dict
    )
    recorder = Recorder(recipe, VisionSpec(0, FAMILIES["qwen3_vl"]))
    coordinator = MainCoordinator(recipe, None, ticket_server, "run", [], {}, Event(), recorder)
    coordinator.record(1, 1, [Group("7-n", "a", (episode(),))], {})
    coordinator.metrics.close()
    recorder.close()
    assert seen == [[1]]
    line = json.loads((tmp_path / "r" / "ledger.jsonl").read_text())
    assert line == {"step": 1, "tickets": [7], "weights": "1-p"}
