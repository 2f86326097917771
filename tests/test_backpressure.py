"""A learner whose step is stuck while actors go on producing: they wait, nothing grows, nothing is lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from actor.loop import run_actor
from shared.types import Ticket, Trajectory
from tests.support.hostile.memory import resident_bytes
from tests.support.machine import until_async
from tests.support.wires import actor_settings, episode, start_ticket_server

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
