"""An engine that is started anew in mid-run is given the weights again while the learner waits for groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from learner.weights import engine_watch
from learner.weights.engine_watch import EngineWatch
from learner.weights.link import EngineLink
from tests.support.machine import children_of, until
from tests.support.runs import local, metrics, places
from tests.support.tiny import running_engine


@pytest.fixture
def link(monkeypatch):
    monkeypatch.setattr(engine_watch, "PATIENCE_S", 0.1)
    link = EngineLink()
    yield link
    link.close()


@pytest.fixture(scope="module")
def engines(folder):
    """One that has been started anew, one that holds this learner's version 3, and one that holds a dead learner's."""
    with (
        running_engine(folder, weight_version="none") as (back, _),
        running_engine(folder, weight_version="3-mine") as (w, _),
        running_engine(folder, weight_version="3-dead") as (undone, _),
    ):
        yield back, w, undone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "fresh", "found"),
    [
        (("back",), True, True),
        (("back", "well"), True, True),
        (("undone", "well"), True, True),
        (("undone",), False, True),
        (("well",), True, False),
        (("gone", "http://[::1"), True, False),
        (("back", "well"), False, False),
        (("back", "gone"), False, True),
    ],
)
def test_an_engine_with_another_version_is_noticed_and_a_silent_one_is_not(engines, link, here, fresh, found):
    """Between publications (not fresh) only when no engine is left with the weights."""
    urls = dict(zip(("back", "well", "undone"), engines, strict=True)) | {"gone": "http://127.0.0.1:9"}
    with EngineWatch(link, lambda: [urls.get(name, name) for name in here], "3-mine", fresh=fresh) as watch:
        assert watch.found.wait(20 if found else 1) is found


@pytest.mark.slow
def test_a_run_goes_on_after_its_only_engine_is_killed(tmp_path):
    """In the middle between two publications, too: without episodes there would never be the next."""
    fields = {"learner.total_steps": 7, "learner.publish.every": 5, "eval.samples": 0, "learner.wait_timeout_s": 200}
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(local(places(tmp_path, **fields)), stderr=log, stdout=subprocess.PIPE)
    try:
        rows = tmp_path / "colour_tiny" / "metrics.jsonl"
        until(lambda: run.poll() is not None or (rows.exists() and metrics(tmp_path)), 120.0)
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
    assert json.loads(out)["optimizer_steps"] == 7


def commands(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
