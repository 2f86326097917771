"""A stage that plays episodes without an engine, a bare learner that the test controls, and real actor processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from actor.actor_loop import run_actor
from learner.tickets.sources import SeedSource
from shared.clocks import clock_name
from shared.config.recipe import load_recipe
from shared.types import Hello, Request, Sampling, Stop, Ticket, Tickets, Trajectory, Welcome
from shared.wire.codec import decode, encode
from tests.support.wires import actor_settings, episode

RECIPE = "launch/recipes/colour_tiny.toml"
START_LIMIT_S = 120.0
Play = Callable[[Ticket, int], Coroutine[Any, Any, Trajectory]]


class Stage:
    """Plays episodes without an engine, and counts how many run at once. Every episode waits until `gate` is set."""

    def __init__(self, *, gated: bool = False) -> None:
        self.gate = asyncio.Event()
        if not gated:
            self.gate.set()
        self.running: list[tuple[str, int]] = []
        self.most = 0
        self.cancelled: list[str] = []

    async def play(self, ticket: Ticket, index: int) -> Trajectory:
        self.running.append((ticket.id, index))
        self.most = max(self.most, len({ticket_id for ticket_id, _ in self.running}))
        try:
            await asyncio.sleep(0.001)
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(ticket.id)
            raise
        finally:
            self.running.remove((ticket.id, index))
        return episode(ticket.version, reward=float(index))


class Learner:
    """A learner that is a bare ROUTER controlled by the test."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.peer = b""
        self.process_id = "first"
        self.engines: tuple[str, ...] = ()
        self.clock, self.ahead_s = clock_name(), 0.0  # this host's

    async def expect(self, kind: type, where: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the next message of this kind for which `where` holds; answer each Hello with a Welcome."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not self.socket.poll(0):
                await asyncio.sleep(0.005)
                continue
            self.peer, *frames = self.socket.recv_multipart()
            message = decode(frames)
            if isinstance(message, Hello):
                clock = message.clock_s, time.monotonic() + self.ahead_s, self.clock
                self.send(Welcome("run-1", 0, self.process_id, self.engines, *clock))
            if isinstance(message, kind) and where(message):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def send(self, message: Any) -> None:
        self.socket.send_multipart([self.peer, *encode(message)])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def ticket(name: str, group_size: int = 1) -> Ticket:
    return Ticket(name, SeedSource().sample(0), group_size, 0, Sampling(), 60.0)


def with_learner(test: Callable[[Learner], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Wrap an async test that needs a learner into a function that pytest can call."""

    def run() -> None:
        learner = Learner()
        try:
            asyncio.run(asyncio.wait_for(test(learner), 20))
        finally:
            learner.close()

    return run


def start(learner: Learner, play: Play, **changes: Any) -> asyncio.Task[int]:
    return asyncio.create_task(run_actor(actor_settings(learner.address, **changes), play))


async def start_with(learner: Learner, play: Play, *tickets: Ticket) -> asyncio.Task[int]:
    """Start an actor, wait until it requests tickets, and send it these."""
    actor = start(learner, play)
    await learner.expect(Request)
    learner.send(Tickets(tickets))
    return actor


async def dismiss(learner: Learner, actor: asyncio.Task[int]) -> None:
    learner.send(Stop("over"))
    assert await actor == 0


@contextmanager
def actor_process(learner: Learner, *overrides: str, engine: str = "http://127.0.0.1:9") -> Iterator[subprocess.Popen]:
    """Yield an actor process that plays tickets of `learner` by `RECIPE` with `overrides`; its stderr is a pipe. Kill
    it at the end if it still runs."""
    recipe = load_recipe(RECIPE, ["--actor.learner", learner.address, *overrides])
    settings = {"recipe": recipe.model_dump(mode="json"), "index": 0, "engine_urls": [engine], "journals": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "actor.worker"],
        env={**os.environ, "PRONK_ACTOR": json.dumps(settings)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def give(learner: Learner, *tickets: Ticket) -> None:
    """Wait until the actor that was just started requests tickets, and send it these."""
    deadline = time.monotonic() + START_LIMIT_S
    while not await _asks(learner):
        assert time.monotonic() < deadline, "the actor did not start"
    learner.send(Tickets(tickets))


async def _asks(learner: Learner) -> bool:
    try:
        return bool(await learner.expect(Request))
    except AssertionError:
        return False
