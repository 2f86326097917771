"""The learner waits for an evaluation as long as it goes on, and the other ranks with it."""

from __future__ import annotations

import time
from functools import partial
from threading import Event
from types import SimpleNamespace

import pytest

from learner.coordinator import MainCoordinator, RemoteCoordinator
from learner.tickets.ticket_records import EvaluationResult
from learner.tickets.ticket_server import Interrupted, wait_for_evaluation
from shared.config.learner_section import LearnerConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RunConfig
from shared.log import get_logger

LIMIT_S = 0.05
RESULT = EvaluationResult("before", (), {})


def coordinator_of(tmp_path, *, episodes: int, each_s: float) -> MainCoordinator:
    """Of an evaluation of so many episodes, one of which comes each so many seconds."""
    began = time.monotonic()

    def left(_name: str) -> int:
        return max(0, episodes - int((time.monotonic() - began) / each_s))

    def result(name: str, timeout_s: float, *_: Event) -> EvaluationResult:
        time.sleep(timeout_s)
        if left(name):
            raise TimeoutError(f"no result of evaluation {name!r} within {timeout_s:g} s: two actors play")
        return RESULT

    server = SimpleNamespace(process_id="p", evaluation_result=result, evaluation_left=left)
    recipe = Recipe(
        model=ModelConfig(path="m"),
        env=EnvConfig(module="e"),
        run=RunConfig(dir=str(tmp_path), name="r"),
        learner=LearnerConfig(wait_timeout_s=LIMIT_S),
    )
    return MainCoordinator(recipe, None, server, "run", [], {}, Event(), None)  # type: ignore[arg-type]


@pytest.fixture
def told(monkeypatch):
    """What rank 0 told the other ranks."""
    flags: list[bool] = []
    monkeypatch.setattr("learner.coordinator.broadcast_flag", lambda value, ranks: flags.append(value))
    return flags


def test_an_evaluation_that_goes_on_may_take_longer_than_the_limit(tmp_path, told):
    coordinator = coordinator_of(tmp_path, episodes=400, each_s=0.001)
    goes_on = partial(told.append, True)
    assert wait_for_evaluation(coordinator.ticket_server, "before", LIMIT_S, Event(), goes_on) is RESULT
    assert len(told) > 2 and all(told)


def test_one_that_brings_nothing_for_so_long_is_an_error_that_says_what_it_waited_for(tmp_path, told):
    coordinator = coordinator_of(tmp_path, episodes=1, each_s=1e6)
    coordinator._running.append(("before", 0))
    with pytest.raises(TimeoutError, match=r"'before' has brought nothing for 0.05 s .*: two actors play"):
        coordinator.finish_evaluations()
    assert told and all(told)


def test_other_ranks_wait_until_rank_0_has_the_results(tmp_path, monkeypatch, told):
    coordinator_of(tmp_path, episodes=1, each_s=1.0).finish_evaluations()  # none runs
    assert told == [False, True]
    heard = [True, True, False, True]
    monkeypatch.setattr("learner.coordinator.broadcast_flag", lambda value, ranks: heard.pop(0))
    assert RemoteCoordinator(None).finish_evaluations()  # type: ignore[arg-type]
    assert heard == []


def test_one_that_a_shutdown_cuts_off_is_named_and_not_taken_for_finished(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(get_logger("learner"), "propagate", True)
    monkeypatch.setattr("learner.coordinator.broadcast_flag", lambda value, ranks: value)
    coordinator = coordinator_of(tmp_path, episodes=1, each_s=1e6)
    coordinator._running += [("after", 6), ("greedy_after", 6)]

    def interrupted(*_: object) -> EvaluationResult:
        raise Interrupted

    coordinator.ticket_server.evaluation_result = interrupted
    assert not coordinator.finish_evaluations()
    assert "cut off by the shutdown: evaluation after, greedy_after" in caplog.text
    assert coordinator.results == {}
