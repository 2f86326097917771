"""An actor process that ends in mid-episode, and the one that is started in its place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from actor.actor_loop import run_actor
from actor.journal import Journal
from shared.types import Bye, Cancel, Group, Hello, Receipt, Request, Ticket, Tickets, Trajectory
from shared.wire.codec import decode
from tests.support.actor_rig import Learner, Stage, dismiss, ticket, with_learner
from tests.support.machine import until_async
from tests.support.wires import actor_settings


@with_learner
async def test_an_actor_that_is_started_again_names_what_its_journal_holds_and_plays_it(learner: Learner) -> None:
    with TemporaryDirectory() as folder:
        first = Journal(Path(folder), 2**20)
        for name in ("open", "void"):
            first.begin(ticket(name))
        journal = Journal(Path(folder), 2**20)  # of the next process
        stage = Stage(gated=True)
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), stage.play, journal))
        hello = await learner.expect(Hello)
        assert sorted(hello.held) == ["open", "void"]
        learner.send(Tickets((ticket("new"), ticket("open"))))
        learner.send(Cancel(("void",), "the learner has no use for these tickets"))
        await learner.expect(Hello, lambda m: sorted(m.held) == ["new", "open"])
        stage.gate.set()
        groups = [await learner.expect(Group) for _ in range(2)]
        assert {group.ticket_id for group in groups} == {"open", "new"}
        assert len(list(Path(folder).iterdir())) == 2  # the groups may be lost on their way
        learner.send(Receipt(("new", "open")))
        await until_async(lambda: not list(Path(folder).iterdir()))
        await dismiss(learner, actor)


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
def test_an_actor_that_fails_leaves_its_journal_to_the_next_process_and_one_that_leaves_does_not(
    tmp_path: Path, ending: str
) -> None:
    @with_learner
    async def run(learner: Learner) -> None:
        stage = Stage(gated=True)

        async def play(ticket: Ticket, index: int) -> Trajectory:
            await stage.play(ticket, index)
            raise ZeroDivisionError("too many calls hang")

        actor = asyncio.create_task(run_actor(actor_settings(learner.address), play, Journal(tmp_path, 2**20)))
        await learner.expect(Request)
        learner.send(Tickets((ticket("t"),)))
        await learner.expect(Hello, lambda m: m.held == ("t",))
        stage.gate.set() if ending == "failed" else actor.cancel()
        with pytest.raises((ExceptionGroup, asyncio.CancelledError)):
            await actor
        if ending == "cancelled":
            await learner.expect(Bye)
        await asyncio.sleep(0.05)
        while learner.socket.poll(0):
            assert not isinstance(decode(learner.socket.recv_multipart()[1:]), Bye)

    run()
    assert len(list(tmp_path.iterdir())) == (ending == "failed")
