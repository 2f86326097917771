"""How an actor ends: told to, refused, without a learner, by its own error, or asked to."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from actor.loop import run_actor
from shared.types import Bye, Hello, Request, Stop, Ticket, Trajectory, Welcome
from tests.support.actor_rig import Learner, Stage, start, start_with, ticket, with_learner
from tests.support.wires import actor_settings


def test_an_unreachable_learner_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        settings = actor_settings(address, "lonely", connect_timeout_s=0.3)
        assert asyncio.run(run_actor(settings, Stage().play)) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert address in lines[0]
    assert "--actor.learner" in lines[0]


def test_a_learner_that_refuses_the_actor_ends_it_with_an_error(tmp_path: Path) -> None:
    async def test(learner: Learner) -> None:
        actor = start(learner, Stage().play)
        while not learner.socket.poll(0):
            await asyncio.sleep(0.01)
        learner.peer = learner.socket.recv_multipart()[0]
        learner.send(Stop("another vocabulary"))
        assert await actor == 1

    with_learner(test)


def test_an_error_in_play_ends_the_actor_and_says_goodbye() -> None:
    async def broken(ticket: Ticket, index: int) -> Trajectory:
        raise ZeroDivisionError("a bug, not an ending")

    async def test(learner: Learner) -> None:
        actor = await start_with(learner, broken, ticket("t"))
        with pytest.raises(ExceptionGroup) as caught:
            await actor
        assert caught.group_contains(ZeroDivisionError)
        assert (await learner.expect(Bye)).reason == "failed"

    with_learner(test)


def test_a_cancelled_actor_cancels_its_episodes_and_says_goodbye() -> None:
    async def test(learner: Learner) -> None:
        stage = Stage(gated=True)
        actor = await start_with(learner, stage.play, ticket("t"))
        await learner.expect(Hello, lambda m: m.held == ("t",))
        actor.cancel()
        with pytest.raises(asyncio.CancelledError):
            await actor
        assert stage.cancelled == ["t"]
        assert (await learner.expect(Bye)).reason == "asked to stop"

    with_learner(test)


def test_an_actor_ends_with_an_error_when_the_learner_failed() -> None:
    async def test(learner: Learner) -> None:
        actor = start(learner, Stage().play)
        await learner.expect(Request)
        learner.send(Welcome("run", 0, "p"))
        learner.send(Stop("the learner failed", failed=True))
        assert await actor == 1

    with_learner(test)
