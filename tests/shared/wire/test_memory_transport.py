"""A transport of one's own: messages between threads of one process, registered from here alone."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from pathlib import Path

import pytest

from actor.actor_loop import run_actor
from shared.types import Hello, Stop, Ticket, Trajectory, Welcome
from shared.wire.codec import Frame, Limits, Message, decode, encode
from shared.wire.endpoints import ActorKeys, Delivery, EndpointSettings, LearnerKeys, Transport
from shared.wire.transports import TRANSPORTS, connect, listen
from tests.support.wires import actor_settings, episode, start_ticket_server

ADDRESS = "memory://learner"


class Learner:
    """The learner's end. What actors have sent waits in one queue of bounded length."""

    def __init__(self, transport: Memory, address: str, settings: EndpointSettings) -> None:
        self.address = address
        self.limits = Limits(message_bytes=settings.max_message_bytes)
        self.refused: dict[str, int] = {}
        self.room = settings.queue_messages
        self.inbox: deque[tuple[bytes, list[Frame]]] = deque()
        self.actors: dict[bytes, Actor] = {}
        self.changed = threading.Event()
        self._transport = transport

    def wait(self, timeout_s: float) -> bool:
        if not self.inbox:
            self.changed.wait(timeout_s)
        self.changed.clear()
        return bool(self.inbox)

    def wake(self) -> None:
        self.changed.set()

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, peer: bytes, message: Message) -> Delivery:
        frames = encode(message, self.limits)
        if (actor := self.actors.get(peer)) is None:
            return Delivery.GONE
        return Delivery.SENT if actor.deliver(frames) else Delivery.FULL

    def close(self) -> None:
        self._transport.learners.pop(self.address, None)


class Actor:
    """An actor's end. It looks for the learner whenever it sends, so that either may come first."""

    _numbers = itertools.count()

    def __init__(self, transport: Memory, address: str, name: str, settings: EndpointSettings) -> None:
        self._transport = transport
        self._address = address
        self._peer = f"{name}#{next(self._numbers)}".encode()
        self._limits = Limits(message_bytes=settings.max_message_bytes)
        self._room = settings.queue_messages
        self._inbox: deque[list[Frame]] = deque()
        self._loop = asyncio.get_running_loop()
        self._arrival = asyncio.Event()

    def deliver(self, frames: list[Frame]) -> bool:
        """Take a message from the learner's thread; return False if the queue is full."""
        if len(self._inbox) >= self._room:
            return False
        self._inbox.append([bytes(frame) for frame in frames])
        self._loop.call_soon_threadsafe(self._arrival.set)
        return True

    async def send(self, message: Message) -> bool:
        frames = encode(message, self._limits)
        learner = self._transport.learners.get(self._address)
        if learner is None or len(learner.inbox) >= learner.room:
            return False
        learner.actors[self._peer] = self
        learner.inbox.append((self._peer, [bytes(frame) for frame in frames]))
        learner.wake()
        return True

    async def receive(self, timeout_s: float) -> Message | None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._inbox:  # a message that was taken at once leaves the event set
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            return None
        return decode(self._inbox.popleft(), self._limits)

    def trouble(self) -> str:
        return ""

    def close(self, linger_s: float = 0.0) -> None:
        if learner := self._transport.learners.get(self._address):
            learner.actors.pop(self._peer, None)


class Memory(Transport):
    """The transport of `memory://NAME`."""

    form = "memory://NAME"

    def __init__(self) -> None:
        self.learners: dict[str, Learner] = {}

    def check_address(self, field: str, address: str) -> None:
        if not address.removeprefix("memory://"):
            raise ValueError(f"{field} = {address!r} is no address: write it as {self.form}")

    def is_local(self, address: str) -> bool:
        return True

    def listen(self, address: str, settings: EndpointSettings, keys: LearnerKeys | None) -> Learner:
        if address in self.learners:
            raise ValueError(f"learner.bind = {address!r}: another learner is there; choose another name")
        self.learners[address] = Learner(self, address, settings)
        return self.learners[address]

    def connect(self, address: str, name: str, settings: EndpointSettings, keys: ActorKeys | None) -> Actor:
        return Actor(self, address, name, settings)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The transport, registered for one test."""
    made = Memory()
    monkeypatch.setitem(TRANSPORTS, "memory", made)
    return made


async def play(ticket: Ticket, index: int) -> Trajectory:
    return episode(ticket.version, reward=float(index))


def test_tickets_groups_and_receipts_travel_over_it_and_each_group_is_trained_once(tmp_path: Path) -> None:
    server = start_ticket_server(tmp_path, address=ADDRESS, group_size=2, groups_per_version=4, max_staleness=1)
    trained: list[tuple[int, str]] = []

    def learn() -> None:
        server.open(0)
        for version in range(1, 6):
            batch = server.next_batch(4, 30.0)
            trained.extend((version, ticket.id) for ticket, _ in batch)
            assert all([t.reward for t in group.trajectories] == [0.0, 1.0] for _, group in batch)
            server.commit()
            server.set_version(version)
        server.stop("all is trained")

    async def run() -> list[int]:
        actors = [run_actor(actor_settings(ADDRESS, name), play) for name in ("a", "b")]
        return list((await asyncio.gather(asyncio.to_thread(learn), *actors))[1:])

    assert asyncio.run(run()) == [0, 0]
    ids = [ticket_id for _, ticket_id in trained]
    assert len(ids) == len(set(ids)) == 20
    assert server.max_staleness_seen <= 1
    assert server.metrics()["wire/rejected"] == 0


def test_a_learner_that_comes_back_gets_what_the_actor_has_kept(tmp_path: Path, memory: Memory) -> None:
    """The first process ends before it has told anybody that it trained; the second one has its checkpoint."""

    async def run() -> None:
        first = start_ticket_server(tmp_path / "first", address=ADDRESS)
        first.open(0)
        actor = asyncio.create_task(run_actor(actor_settings(ADDRESS), play))
        while first.metrics()["queue/ready_groups"] < 2:
            await asyncio.sleep(0.01)
        checkpoint = first.state_dict()
        before = await asyncio.to_thread(first.next_batch, 2, 30.0)
        await asyncio.to_thread(first.go_silently)
        assert ADDRESS not in memory.learners

        second = start_ticket_server(tmp_path / "second", address=ADDRESS)
        second.load_state(checkpoint)
        second.open(0)
        after = await asyncio.to_thread(second.next_batch, 2, 30.0)
        assert [ticket.sample.id for ticket, _ in after] == [ticket.sample.id for ticket, _ in before]
        await asyncio.to_thread(second.stop, "the test is over")
        assert await actor == 0

    asyncio.run(run())


def test_a_full_queue_refuses_and_says_so() -> None:
    async def run() -> None:
        learner = listen(ADDRESS, EndpointSettings(queue_messages=2))
        actor = connect(ADDRESS, "a", EndpointSettings(queue_messages=2))
        sent = [await actor.send(Hello("a", (), 5)) for _ in range(3)]
        assert sent == [True, True, False]
        received = learner.receive()
        assert received is not None
        assert decode(received[1]) == Hello("a", (), 5)
        peer = received[0]
        answers = [learner.send(peer, Welcome("r", 0, "p")) for _ in range(3)]
        assert answers == [Delivery.SENT, Delivery.SENT, Delivery.FULL]
        assert learner.send(b"nobody", Stop("x")) is Delivery.GONE

    asyncio.run(run())


def test_an_address_of_it_is_checked_where_it_is_used() -> None:
    with pytest.raises(ValueError, match=r"learner\.bind = 'shm://x' is no address: write it as tcp://.*memory://NAME"):
        listen("shm://x")
    other = listen(ADDRESS)
    with pytest.raises(ValueError, match="another learner is there"):
        listen(ADDRESS)
    other.close()
    listen(ADDRESS).close()
