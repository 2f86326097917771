"""What is started again, when, and how often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.processes.actor_supervisor import ActorFailed, ActorProcess
from launch.processes.children import Child
from launch.processes.restarts import Restarts, TooManyRestarts
from shared.config.recipe import Recipe
from shared.config.sections import ActorConfig, EnvConfig, ModelConfig
from tests.support.machine import until


def test_pauses_double_while_it_fails_early_and_there_is_none_once_it_ran_well() -> None:
    now = 0.0
    restarts = Restarts(10, clock=lambda: now)
    pauses = [restarts.pause_s() for _ in range(4)]
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    restarts.started()
    now += 40.0
    assert restarts.pause_s() == 0.0


def test_there_is_a_limit_within_an_hour() -> None:
    now = 0.0
    restarts = Restarts(2, clock=lambda: now)
    restarts.pause_s()
    restarts.pause_s()
    with pytest.raises(TooManyRestarts, match="after 2 restarts"):
        restarts.pause_s()
    now = 3601.0
    restarts.pause_s()


def actor_that(code: str, monkeypatch: pytest.MonkeyPatch, max_restarts: int = 1) -> ActorProcess:
    def start(name: str, command: list[str], *, env: dict[str, str]) -> Child:
        return Child(name, subprocess.Popen([sys.executable, "-c", code]))

    monkeypatch.setattr("launch.processes.actor_supervisor.start", start)
    recipe = Recipe(
        model=ModelConfig(path="m"), env=EnvConfig(module="e"), actor=ActorConfig(max_restarts=max_restarts)
    )
    actor = ActorProcess(recipe, 0, ())
    actor.start()
    return actor


def keep(actor: ActorProcess) -> None:
    until(lambda: actor.keep_alive() or actor.done)


def test_an_actor_that_was_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    code = (
        f"import os, pathlib\np = pathlib.Path({str(mark)!r})\nif not p.exists():\n p.touch(); os.kill(os.getpid(), 9)"
    )
    keep(actor_that(code, monkeypatch))
    assert mark.exists()


@pytest.mark.parametrize(
    ("code", "max_restarts", "expected"),
    [(2, 5, "exit code 2"), (3, 5, "exit code 3"), (7, 0, "actor.max_restarts")],
)
def test_an_actor_that_cannot_work_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, code: int, max_restarts: int, expected: str
) -> None:
    with pytest.raises(ActorFailed, match=expected) as failure:
        keep(actor_that(f"raise SystemExit({code})", monkeypatch, max_restarts))
    assert failure.value.code == code
