"""An engine that is started anew in mid-run is given the weights again while the learner waits for groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from learner.learner_loop import next_groups
from learner.weights import engine_watch
from learner.weights.engine_link import EngineLink
from learner.weights.engine_watch import EngineWatch
from tests.support.engines import JoiningEngine, false_engine, hangs_up, says
from tests.support.machine import children_of, until
from tests.support.publishing import policy, publish_settings, publishing, served
from tests.support.runs import local, metrics, places
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture


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
        assert watch.publication_due.wait(20 if found else 1) is found


class Waiting:
    """A coordinator that has groups after `wait_s`, unless an engine is back before. Asked to shut down in the tenth
    round."""

    def __init__(self, engines, wait_s):
        self.engines, self.wait_s, self.rounds = lambda: frozenset(engines), wait_s, 0

    def next_groups(self, engine_is_back):
        self.rounds += 1
        return () if engine_is_back.wait(self.wait_s) else ("a group",)

    def shutdown_requested(self):
        return self.rounds == 10


def waited(publisher, coordinator, limit_s=60.0):
    """The groups of a step after version 1."""
    learner = SimpleNamespace(publish=SimpleNamespace(every=1), wait_timeout_s=limit_s)
    return next_groups(SimpleNamespace(learner=learner), coordinator, SimpleNamespace(num_steps=1), publisher, 1)


@pytest.fixture
def quick_publisher(policy, ranks, monkeypatch):
    monkeypatch.setattr(engine_watch, "PATIENCE_S", 0.1)
    with publishing(
        policy, ranks, publish_settings(timeout_s=1.0, call_timeout_s=1.0, health_timeout_s=2.0)
    ) as publisher:
        yield publisher


def calls_its_weights(name):
    return says({"model_path": "x", "weight_version": name})


QUANTIZED = {"/server_info": says({"quantization": "fp8"})}
CANNOT_JOIN = {"/init_weights_update_group": says({"success": False}, 400)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [QUANTIZED, CANNOT_JOIN])
def test_an_engine_that_answers_and_takes_no_weights_is_left_alone_until_it_is_started_anew(
    folder, quick_publisher, fault
):
    answers = fault | {"/model_info": calls_its_weights("default")}
    with running_engine(folder) as (good, _), false_engine(answers) as (bad, _):
        assert served(quick_publisher.publish(1, [good, bad])) == (1, 1)
        coordinator = Waiting([good, bad], 1.5)
        assert waited(quick_publisher, coordinator) == ("a group",) and coordinator.rounds == 1
        answers["/model_info"] = calls_its_weights("none")
        assert waited(quick_publisher, coordinator) == ("a group",) and coordinator.rounds == 3  # tried once more
        with quick_publisher.watch(coordinator.engines, 1) as watch:
            answers["/health"] = hangs_up
            assert not watch.publication_due.wait(1)
        with quick_publisher.watch(coordinator.engines, 1) as watch:
            del answers["/health"]
            assert watch.publication_due.wait(10)


@pytest.mark.parametrize("retry_s", [0.5, 60.0])
def test_where_no_engine_has_the_weights_one_that_was_left_out_is_tried_again_now_and_then(
    quick_publisher, monkeypatch, retry_s
):
    monkeypatch.setattr(engine_watch, "RETRY_S", retry_s)
    with false_engine(QUANTIZED | {"/model_info": calls_its_weights("default")}) as (bad, _):
        quick_publisher.publish(1, [bad])
        with quick_publisher.watch(lambda: [bad], 1) as watch:
            assert watch.publication_due.wait(2.0) is (retry_s < 1)


def test_an_engine_that_was_silent_at_a_publication_is_back_as_soon_as_it_answers(quick_publisher):
    answers = {"/health": hangs_up, "/model_info": calls_its_weights("default")}
    with false_engine(answers) as (url, _):
        assert served(quick_publisher.publish(1, [url])) == (0, 1)
        del answers["/health"]
        with quick_publisher.watch(lambda: [url], 1) as watch:
            assert watch.publication_due.wait(10)


@pytest.mark.parametrize("name", ["1", "none"])
def test_an_engine_that_was_left_paused_is_told_to_go_on_as_soon_as_it_answers(quick_publisher, name):
    """Also where it was silent meanwhile, so that nobody knows what it was left with."""

    def goes_on(request, body):
        told.append(body)
        says({"success": True})(request, body)

    engine, told = JoiningEngine({"/continue_generation": hangs_up, "/model_info": hangs_up}), []
    with engine as url:
        assert served(quick_publisher.publish(1, [url])) == (0, 1)
        until(lambda: "/model_info" in dict(engine.seen))
        engine.routes["/model_info"] = says({}, 503)
        with quick_publisher.watch(lambda: [url], 1) as watch:
            time.sleep(0.5)
            engine.routes["/continue_generation"] = goes_on
            until(lambda: told)
            engine.routes["/model_info"] = calls_its_weights(name)
            assert watch.publication_due.wait(1) is (name != "1")  # which has the weights and needs no others
    assert len(told) == 1


def test_an_error_of_the_watch_itself_is_said_once_and_it_goes_on(link, caplog):
    def engines():
        asked.append(1)
        if len(asked) < 4:
            raise RuntimeError("changed meanwhile")
        return [url]

    asked = []
    with false_engine({"/model_info": calls_its_weights("none")}) as (url, _), EngineWatch(link, engines, "3") as watch:
        assert watch.publication_due.wait(20)
    assert caplog.text.count("RuntimeError: changed meanwhile") == 1


def test_engines_that_come_back_do_not_prolong_the_wait_for_groups(quick_publisher):
    """One is back at once, and then there are neither groups nor other engines."""
    with false_engine(QUANTIZED | {"/model_info": calls_its_weights("default")}) as (url, _):
        coordinator, started = Waiting([url], 30.0), time.monotonic()
        with pytest.raises(TimeoutError, match=r"learner\.wait_timeout_s = 2 s, in which engines came back"):
            waited(quick_publisher, coordinator, limit_s=2.0)
        assert coordinator.rounds == 2 and time.monotonic() - started < 10


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
