"""A learner whose step is stuck while actors go on producing: they wait, nothing grows, nothing is lost."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path

import pytest

from actor.loop import run_actor
from learner.tickets.server import TicketServer, TicketServerSettings
from learner.tickets.sources import SeedSource
from shared.types import Ticket, Trajectory
from tests.support.machine import until_async
from tests.support.wires import RULES, actor_settings, book_settings, episode

ACTORS, PLACES, PER_VERSION, STALENESS = 3, 50, 4, 2
MAY_BE_OPEN = PER_VERSION * (1 + STALENESS)
BEAT_S, STUCK_BEATS = 0.01, 600  # ten minutes, if an actor's heart beats once in a second
PICTURE_BYTES = 2**18
SLACK_BYTES = 2**20  # of 12 open groups with an image each


class Stage:
    """Plays at once; knows what it has played."""

    def __init__(self) -> None:
        self.played: list[str] = []

    async def play(self, ticket: Ticket, index: int) -> Trajectory:
        self.played.append(ticket.id)
        await asyncio.sleep(0)
        return episode(ticket.version, image=os.urandom(PICTURE_BYTES))


async def stand_still(ticket_server: TicketServer, stage: Stage) -> tuple[int, int]:
    """Ten minutes of heartbeats without a step: bytes in use by Python's objects before and after."""
    await until_async(lambda: ticket_server.metrics()["queue/ready_groups"] == MAY_BE_OPEN, 30.0, ticket_server.metrics)
    tracemalloc.start()
    await asyncio.sleep(0.5)
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(STUCK_BEATS):
        await asyncio.sleep(BEAT_S)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(stage.played) == MAY_BE_OPEN
    assert ticket_server.metrics()["tickets/issued"] == ticket_server.metrics()["tickets/open"] == MAY_BE_OPEN
    return before, after


async def train_on(ticket_server: TicketServer, steps: int) -> list[str]:
    trained: list[str] = []
    for step in range(steps):
        batch = await asyncio.to_thread(ticket_server.next_batch, PER_VERSION, 30.0)
        trained += [ticket.id for ticket, _ in batch]
        ticket_server.commit()
        ticket_server.set_version(step + 1)
    return trained


@pytest.mark.slow
def test_while_the_learner_is_stuck_actors_wait_and_then_everything_is_trained(tmp_path: Path) -> None:
    async def run() -> None:
        stage, steps = Stage(), 6
        book = book_settings(groups_per_version=PER_VERSION, max_staleness=STALENESS, total_groups=steps * PER_VERSION)
        ticket_server = TicketServer(
            SeedSource(), book, TicketServerSettings("tcp://127.0.0.1:*", tmp_path, "run-1", RULES)
        )
        ticket_server.open()
        settings = [
            actor_settings(ticket_server.address, f"a{number}", groups=PLACES, heartbeat_s=BEAT_S)
            for number in range(ACTORS)
        ]
        actors = [asyncio.create_task(run_actor(one, stage.play)) for one in settings]
        before, after = await stand_still(ticket_server, stage)
        assert after - before < SLACK_BYTES
        trained = await train_on(ticket_server, steps)
        metrics = ticket_server.metrics()
        await asyncio.to_thread(ticket_server.stop, "enough")
        await asyncio.gather(*actors)
        assert len(trained) == len(set(trained)) == steps * PER_VERSION
        assert set(trained) == set(stage.played)
        assert (metrics["tickets/issued"], metrics["tickets/trained"]) == (len(trained), len(trained))
        assert metrics["tickets/dropped"] == metrics["tickets/open"] == metrics["wire/rejected"] == 0

    asyncio.run(asyncio.wait_for(run(), 200))
