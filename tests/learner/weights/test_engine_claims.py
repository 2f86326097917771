"""An engine takes weights from one living learner alone: the second one loses, is told why, and is taken when the first
is dead or over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actor.engine import weight_routes
from learner.weights import engine_claims
from learner.weights.engine_claims import RunIdentity
from learner.weights.publisher import Publisher
from shared.log import get_logger
from tests.support.engines import JoiningEngine, call, says
from tests.support.publishing import FAST, assert_same, move, policy, publishing, served
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture


@contextmanager
def learner(policy, ranks, folder: Path, process: str, *earlier: str) -> Iterator[Publisher]:
    """Run the publisher of the run in `folder`, whose earlier processes are known."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = RunIdentity.of(folder, lambda other: other in (process, *earlier))
    with publishing(policy, ranks, FAST, None, "", process, lambda *_: None, identity) as publisher:
        yield publisher


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch):
    monkeypatch.setattr(get_logger("publisher"), "propagate", True)


def test_a_second_run_is_refused_while_the_first_lives_and_neither_is_disturbed(
    folder, policy, ranks, tmp_path, caplog
):
    with running_engine(folder) as (url, app), learner(policy, ranks, tmp_path / "first", "a") as first:
        assert served(first.publish(1, [url])) == (1, 0)
        with learner(policy, ranks, tmp_path / "second", "b") as second:
            for version in (1, 2):
                move(policy, 0.01)
                assert served(second.publish(version, [url])) == (0, 1)
                assert call(url, "/model_info")["weight_version"] == f"{version}-a"
                assert served(first.publish(version + 1, [url])) == (1, 0)
                assert_same(app, policy)
        line = "run 'first' publishes to this engine, and was heard of 0 s ago: end it, or give run 'second' engines of"
        assert line in caplog.text


def test_a_run_whose_learner_is_over_frees_its_engines_at_once(folder, policy, ranks, tmp_path):
    with running_engine(folder) as (url, _):
        with learner(policy, ranks, tmp_path / "first", "a") as first:
            first.publish(1, [url])
        with learner(policy, ranks, tmp_path / "second", "b") as second:
            assert served(second.publish(0, [url])) == (1, 0)


def test_a_resumed_run_takes_its_engines_back_at_once(folder, policy, ranks, tmp_path):
    """Its earlier process was killed and has ended nothing."""
    with running_engine(folder) as (url, _), learner(policy, ranks, tmp_path / "run", "a") as killed:
        killed.publish(1, [url])
        with learner(policy, ranks, tmp_path / "run", "b") as resumed:
            assert served(resumed.publish(1, [url])) == (1, 0)


def test_a_dead_learners_engine_is_taken_once_nothing_has_been_heard_of_it_for_a_while(
    folder, policy, ranks, tmp_path, monkeypatch
):
    monkeypatch.setattr(weight_routes, "CLAIM_S", 1.5)
    monkeypatch.setattr(engine_claims, "CLAIM_EVERY_S", 0.3)
    with running_engine(folder) as (url, app), learner(policy, ranks, tmp_path / "first", "a") as first:
        first.publish(1, [url])
        with learner(policy, ranks, tmp_path / "second", "b") as second:
            app.updates._claimed_at -= 1.0
            for _ in range(4):  # it publishes nothing, and lives
                time.sleep(0.5)
                assert served(second.publish(1, [url])) == (0, 1)
            first._link.run(stop(first))
            time.sleep(1.6)
            assert served(second.publish(1, [url])) == (1, 0)


async def stop(publisher: Publisher) -> None:
    """Let the learner be silent, as if it were dead."""
    assert publisher._claims is not None and publisher._claims._task is not None
    publisher._claims._task.cancel()


# ------------------------------------------------------------------ servers that know no learner


def test_a_server_that_tells_only_the_name_of_its_weights_is_not_taken_from_another_learner(
    policy, ranks, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(engine_claims, "QUIET_S", 1.0)
    answers = {"/model_info": says({"model_path": "x", "weight_version": "7-other"})}
    engine = JoiningEngine(answers)
    with engine as url, learner(policy, ranks, tmp_path / "second", "b") as second:
        assert served(second.publish(1, [url])) == (0, 1)
        time.sleep(0.7)
        engine.routes["/model_info"] = says({"model_path": "x", "weight_version": "8-other"})  # it goes on
        assert served(second.publish(1, [url])) == (0, 1)
        time.sleep(0.7)
        assert served(second.publish(1, [url])) == (0, 1)
        assert "another learner publishes to it: its weights are 8-other" in caplog.text
        assert "/init_weights_update_group" not in dict(engine.seen)
        time.sleep(1.1)
        assert served(second.publish(1, [url])) == (1, 0)  # nobody publishes to it any more


def test_the_first_learner_leaves_out_an_engine_whose_weights_another_one_replaces(policy, ranks, tmp_path):
    engine = JoiningEngine({"/model_info": says({"model_path": "x", "weight_version": "none"})})
    with engine as url, learner(policy, ranks, tmp_path / "first", "a") as first:
        assert served(first.publish(1, [url])) == (1, 0)
        engine.routes["/model_info"] = says({"model_path": "x", "weight_version": "1-a"})
        assert served(first.publish(2, [url])) == (1, 0)
        engine.routes["/model_info"] = says({"model_path": "x", "weight_version": "1-intruder"})
        assert served(first.publish(3, [url])) == (0, 1)


@pytest.mark.parametrize("name", ["default", "none", "0", "3", "5-b", "5-earlier"])
def test_weights_of_nobody_or_of_the_own_run_are_replaced_at_once(policy, ranks, tmp_path, name):
    engine = JoiningEngine({"/model_info": says({"model_path": "x", "weight_version": name})})
    with engine as url, learner(policy, ranks, tmp_path / "run", "b", "earlier") as publisher:
        assert served(publisher.publish(1, [url])) == (1, 0)


def test_runs_are_told_apart_by_their_folder_and_its_processes_are_not(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    tokens = {RunIdentity.of(tmp_path / name, str.isdigit).token for name in ("one", "two", "one")}
    assert len(tokens) == 2
