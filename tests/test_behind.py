"""An engine that is started anew in mid-run is given the weights again while the learner waits for groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from learner.weights import engine_watch
from learner.weights.engine_watch import EngineWatch
from tests.support.machine import children_of
from tests.support.runs import local, metrics, places
from tests.support.tiny import running_engine, tiny_model_dir


def test_an_engine_with_another_version_is_noticed_and_a_silent_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_watch, "PATIENCE_S", 0.1)
    with running_engine(tiny_model_dir(tmp_path), weight_version="none") as (url, _):
        with EngineWatch(lambda: [url], 3) as watch:
            assert watch.found.wait(20)
        with EngineWatch(lambda: ["http://127.0.0.1:9"], 3) as watch:
            assert not watch.found.wait(1)
    with (
        running_engine(tiny_model_dir(tmp_path), weight_version="3") as (url, _),
        EngineWatch(lambda: [url], 3) as watch,
    ):
        assert not watch.found.wait(1)


def test_between_publications_engines_are_helped_only_when_none_is_left_with_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_watch, "PATIENCE_S", 0.1)
    folder = tiny_model_dir(tmp_path)
    with running_engine(folder, weight_version="none") as (back, _):
        with (
            running_engine(folder, weight_version="3") as (well, _),
            EngineWatch(lambda: [back, well], 3, fresh=False) as w,
        ):
            assert not w.found.wait(1)
        with EngineWatch(lambda: [back, well], 3, fresh=False) as watch:  # the other is gone
            assert watch.found.wait(20)


@pytest.mark.slow
def test_a_run_goes_on_after_its_only_engine_is_killed(tmp_path):
    """In the middle between two publications, too: without episodes there would never be the next."""
    fields = {"learner.total_steps": 12, "learner.publish_every": 5, "eval.samples": 0, "learner.wait_timeout_s": 200}
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(local(places(tmp_path, **fields)), stderr=log, stdout=subprocess.PIPE)
    try:
        rows = tmp_path / "colour_tiny" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not rows.exists() or not metrics(tmp_path):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        (engine,) = [pid for pid in children_of(run.pid) if b"actor.engine.server" in commands(pid)]
        os.kill(engine, signal.SIGKILL)
        out, _ = run.communicate(timeout=250)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.wait(30)
    words = (tmp_path / "log").read_text()
    assert run.returncode == 0, words[-3000:]
    assert "was ended by SIGKILL; starting it again" in words
    assert json.loads(out)["optimizer_steps"] == 12


def commands(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
