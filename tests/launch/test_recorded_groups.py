"""Recorded groups come back as they were, and what is none is named."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from launch.engines.network import free_port
from launch.recording import RecordingServer
from learner.offline import run_recorded
from learner.shutdown import Shutdown
from shared.config.recipe import load_recipe
from shared.recordings.group_files import GroupWriter, files, read
from shared.vision import VisionSpec
from tests.support.episodes import random_groups
from tests.support.runs import RECIPE
from tests.support.tiny import tiny_model_dir
from tests.support.wires import RULES


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    spec = VisionSpec.load(tiny_model_dir(tmp_path_factory.mktemp("model")), min_pixels=1024, max_pixels=1 << 20)
    return random_groups(spec, 3, group_size=2)


def test_groups_come_back_in_order_and_a_second_recorder_goes_on_behind_them(groups, tmp_path):
    GroupWriter(tmp_path).add(groups[0])
    again = GroupWriter(tmp_path)
    for group in groups[1:]:
        again.add(group)
    back = [read(path) for path in files(tmp_path)]
    assert [g.ticket_id for g in back] == [g.ticket_id for g in groups]
    for got, expected in zip(back, groups, strict=True):
        for a, b in zip(got.trajectories, expected.trajectories, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids) and a.images == b.images and a.turns == b.turns


def test_a_file_that_is_no_group_is_named(groups, tmp_path):
    GroupWriter(tmp_path).add(groups[0])
    (tmp_path / "00000001.group").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"00000001\.group is no recorded group"):
        read(files(tmp_path)[1])
    assert files(tmp_path / "none") == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_actors_record_without_a_learner_and_a_learner_trains_on_it_without_actors(tmp_path):
    folder = tmp_path / "recorded"
    small = [
        "--run.seed",
        "1",
        "--learner.optimizer.lr",
        "1e-9",
        "--learner.groups_per_step",
        "4",
        "--learner.total_steps",
        "3",
        "--actor.groups",
        "4",
    ]
    small += ["--run.dir", str(tmp_path / "runs"), "--engine.port", str(free_port())]
    small += ["--learner.bind", f"tcp://127.0.0.1:{free_port()}"]
    play = [sys.executable, "launch/actors.py", "--config", RECIPE, "--record", str(folder), *small]
    done = subprocess.run(play, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(files(folder)) == 12 and all(len(read(path).trajectories) == 4 for path in files(folder))
    train = [sys.executable, "launch/learner.py", "--config", RECIPE, "--from-recording", str(folder), *small]
    done = subprocess.run(train, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/colour_tiny/checkpoints/step_00000003/meta.json").exists()
    assert f"3 steps on the groups of {folder}" in done.stderr and str(tmp_path / "runs/colour_tiny") in done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["batch/episodes"] == 16 and values["behaviour/logprob_gap"] < 0.1


@pytest.fixture
def recording(tmp_path):
    """A server of three groups, whose ticket server has ended: the test puts another in its place."""
    recipe = load_recipe(RECIPE, ["--learner.groups_per_step", "3", "--learner.total_steps", "1"])
    server = RecordingServer(tmp_path, recipe, RULES)
    server.close()
    return server


def test_each_group_is_given_back_once_it_is_recorded(recording, groups, tmp_path):
    """Actors keep what they have played until it is."""
    left, waiting = [], list(groups)
    recording.ticket_server = SimpleNamespace(
        next_batch=lambda *_: [(None, waiting.pop(0))], commit=lambda: left.append(len(waiting))
    )
    assert recording.work() == "the recording is complete" and left == [2, 1, 0] and len(files(tmp_path)) == 3


@pytest.mark.parametrize(("error", "words"), [(OSError("no space"), "no space"), (MemoryError(), "MemoryError")])
def test_whatever_ends_the_work_is_said_once_and_told_to_the_actors(recording, error, words, caplog):
    def next_batch(*_):
        raise error

    told, ended = [], threading.Event()

    def stop(reason, *, failed):
        told.append((reason, failed))
        ended.set()

    recording.ticket_server = SimpleNamespace(open=lambda version: None, next_batch=next_batch, stop=stop)
    recording.begin()
    assert ended.wait(60)
    assert len(told) == 1 and words in told[0][0] and told[0][1]
    assert [words in record.getMessage() for record in caplog.records] == [True]


def test_a_folder_without_groups_is_named_with_its_cure(tmp_path):
    with pytest.raises(ValueError, match="holds no recorded groups; make some with"):
        run_recorded(load_recipe(RECIPE), tmp_path, Shutdown(1.0))
