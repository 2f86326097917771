"""Clocks that jump: whatever the time of day does, waits and leases go on as before."""

from __future__ import annotations

import ast
import asyncio
import time
from pathlib import Path

import pytest

from actor.loop import run_actor
from shared.types import Ticket, Trajectory
from tests.support.wires import actor_settings, episode, start_ticket_server

ROOT = Path(__file__).parents[1]
DAY_S = 86_400.0
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
MAY_READ = {"learner/metrics/writer.py"}  # writes it beside each row, for people


def calls(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    named = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return {ast.unparse(function).split("datetime.datetime.")[-1] for function in named}


def test_nothing_is_decided_by_the_wall_clock() -> None:
    packages = ("shared", "envs", "actor", "learner", "kernels", "launch")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in files if calls(path) & WALL_CLOCKS}
    assert readers == MAY_READ


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_jump_of_a_day_costs_no_lease_no_actor_and_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    wall, wall_ns, offset = time.time, time.time_ns, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + offset[0])
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(offset[0] * 1e9))
    may_end = asyncio.Event()

    async def play(ticket: Ticket, index: int) -> Trajectory:
        await may_end.wait()
        return episode(ticket.version)

    async def run() -> None:
        ticket_server = start_ticket_server(tmp_path, timeout_s=60.0, lease_s=60.0, lost_after_s=60.0)
        ticket_server.open()
        actor = asyncio.create_task(run_actor(actor_settings(ticket_server.address), play))
        while ticket_server.metrics()["tickets/issued"] < 3:
            await asyncio.sleep(0.01)
        offset[0] = jump_s
        for _ in range(5):
            await asyncio.sleep(0.1)  # heartbeats and ticks after the jump
        assert ticket_server.metrics()["actors/known"] == 1
        offset[0] = -jump_s
        may_end.set()
        batch = await asyncio.to_thread(ticket_server.next_batch, 3, 30.0)
        metrics = ticket_server.metrics()
        await asyncio.to_thread(ticket_server.stop, "enough")
        assert await actor == 0
        assert len(batch) == 3
        assert metrics["tickets/reissued"] == metrics["tickets/dropped"] == 0

    asyncio.run(asyncio.wait_for(run(), 60))
