"""Actors that are faster than their learner: they wait or are cut off, nothing grows, nothing is lost."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from actor.actor_loop import run_actor
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.types import Ticket, Trajectory
from shared.wire.endpoints import EndpointSettings
from tests.support.hostile.memory import resident_bytes
from tests.support.machine import until_async
from tests.support.wires import RULES, actor_settings, book_settings, episode, start_ticket_server

ACTORS, PLACES, PER_VERSION, STALENESS = 3, 50, 4, 2
MAY_BE_OPEN = PER_VERSION * (1 + STALENESS)
BEAT_S, STUCK_BEATS = 0.01, 600  # ten minutes, if an actor's heart beats once in a second
IMAGE_BYTES = 2**18
SLACK_BYTES = 2**24  # all that is sent again in the meantime is a hundred times as much


@pytest.mark.slow
def test_while_the_learner_is_stuck_actors_wait_and_then_everything_is_trained(tmp_path: Path) -> None:
    played: list[str] = []
    trained: list[str] = []
    steps = 6
    server = start_ticket_server(
        tmp_path, groups_per_version=PER_VERSION, max_staleness=STALENESS, total_groups=steps * PER_VERSION
    )
    server.open()

    async def play(ticket: Ticket, index: int) -> Trajectory:
        played.append(ticket.id)
        await asyncio.sleep(0)
        return episode(ticket.version, image=os.urandom(IMAGE_BYTES))

    async def stand_still() -> int:
        """Ten minutes of heartbeats without a step: how many more bytes are resident after them, libzmq's too."""
        await until_async(lambda: server.metrics()["queue/ready_groups"] == MAY_BE_OPEN, 30.0, server.metrics)
        await asyncio.sleep(0.5)
        before = resident_bytes()
        await asyncio.sleep(BEAT_S * STUCK_BEATS)
        after = resident_bytes()
        assert len(played) == MAY_BE_OPEN
        assert server.metrics()["tickets/issued"] == server.metrics()["tickets/open"] == MAY_BE_OPEN
        return after - before

    async def run() -> None:
        settings = [actor_settings(server.address, f"a{i}", groups=PLACES, heartbeat_s=BEAT_S) for i in range(ACTORS)]
        actors = [asyncio.create_task(run_actor(one, play)) for one in settings]
        assert await stand_still() < SLACK_BYTES
        for step in range(steps):
            batch = await asyncio.to_thread(server.next_batch, PER_VERSION, 30.0)
            trained.extend(ticket.id for ticket, _ in batch)
            server.commit()
            server.set_version(step + 1)
        metrics = server.metrics()
        await asyncio.to_thread(server.stop, "enough")
        await asyncio.gather(*actors)
        assert len(trained) == len(set(trained)) == steps * PER_VERSION and set(trained) == set(played)
        assert (metrics["tickets/issued"], metrics["tickets/trained"]) == (len(trained), len(trained))
        assert metrics["tickets/dropped"] == metrics["tickets/open"] == metrics["wire/rejected"] == 0

    asyncio.run(asyncio.wait_for(run(), 200))


@pytest.mark.slow
def test_an_actor_whose_groups_come_faster_than_they_are_read_is_cut_off_and_loses_none(tmp_path: Path) -> None:
    total, image_bytes = 64, 9 * 2**17
    go_on = threading.Event()
    settings = TicketServerSettings(
        "tcp://127.0.0.1:*",
        tmp_path,
        "run-1",
        RULES,
        endpoint=EndpointSettings(max_message_bytes=2**21),
        check=lambda group: None if go_on.wait(60.0) else pytest.fail("never let go on"),
    )
    server = TicketServer(SeedSource(), book_settings(groups_per_version=total), settings)
    server.open()

    async def play(ticket: Ticket, index: int) -> Trajectory:
        return episode(ticket.version, image=os.urandom(image_bytes))

    async def run() -> None:
        actor = asyncio.create_task(run_actor(actor_settings(server.address, groups=total), play))
        await until_async(lambda: server.metrics().get("wire/refused_connections/flood"), 30.0, server.metrics)
        go_on.set()
        batch = await asyncio.to_thread(server.next_batch, total, 60.0)
        assert len({ticket.id for ticket, _ in batch}) == total
        metrics = server.metrics()
        assert metrics["tickets/dropped"] == metrics["wire/rejected"] == 0
        await asyncio.to_thread(server.stop, "enough")
        await actor

    asyncio.run(asyncio.wait_for(run(), 120))
