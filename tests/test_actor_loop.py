"""The actor's loop against the real intake, and against a learner that loses, cancels and falls silent."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq

from actor.loop import run_actor
from learner.samples import SeedSource
from shared.codec import decode, encode
from shared.transport import SocketSettings
from shared.types import (
    Ack,
    Bye,
    Cancel,
    Ending,
    Group,
    Hello,
    Receipt,
    Request,
    Sampling,
    Stop,
    Ticket,
    Tickets,
    Trajectory,
    Welcome,
)
from tests.wires import actor_settings, episode, start_intake


class Stage:
    """Plays episodes; counts what runs at once. `gate` holds every episode back until it is set."""

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
    """A bare ROUTER in the test's hands."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.peer = b""
        self.process_id = "first"

    async def expect(self, kind: type, where: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next message of this kind for which `where` holds; each Hello is welcomed."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not self.socket.poll(0):
                await asyncio.sleep(0.005)
                continue
            self.peer, *frames = self.socket.recv_multipart()
            message = decode(frames)
            if isinstance(message, Hello):
                self.send(Welcome("run-1", 0, self.process_id))
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


def with_learner(test: Callable[[Learner], Coroutine[Any, Any, None]]) -> None:
    learner = Learner()
    try:
        asyncio.run(asyncio.wait_for(test(learner), 20))
    finally:
        learner.close()


def test_actors_fill_batches_until_the_learner_says_stop(tmp_path: Path) -> None:
    intake = start_intake(tmp_path, group_size=2)
    stage_of: dict[str, Stage] = {}

    def learn() -> list[int]:
        while len(intake.engines()) < 2:
            time.sleep(0.01)
        intake.open()
        seeds = []
        for version in range(6):
            batch = intake.next_batch(4, 10.0)
            seeds += [t.sample.metadata["seed"] for t, _ in batch]
            assert all([t.reward for t in g.trajectories] == [0.0, 1.0] for _, g in batch)
            intake.set_version(version + 1)
        intake.start_evaluation("end", [SeedSource(900).sample(i) for i in range(7)], Sampling(), group_size=3)
        result = intake.evaluation_result("end", 10.0)
        assert [len(g.trajectories) for _, g in result.groups] == [3] * 7
        assert intake.engines() == {"http://engine-of-a", "http://engine-of-b"}
        intake.stop("enough")
        return seeds

    async def main() -> None:
        loop = asyncio.get_running_loop()
        learned = loop.run_in_executor(None, learn)
        actors = []
        for name in "ab":
            stage_of[name] = Stage()
            actors.append(asyncio.create_task(run_actor(actor_settings(intake.address, name), stage_of[name].play)))
        seeds = await learned
        assert len(seeds) == len(set(seeds)) == 24
        assert set(seeds) <= set(range(28))
        assert await asyncio.gather(*actors) == [0, 0]

    try:
        asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        intake.stop("test over")
    assert all(0 < stage.most <= 3 for stage in stage_of.values())
    assert intake.max_staleness_seen <= 1


def test_an_actor_says_who_it_is_and_how_much_it_plays_at_once() -> None:
    async def test(learner: Learner) -> None:
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), Stage().play))
        hello = await learner.expect(Hello)
        assert (hello.actor, hello.engine_urls, hello.held) == ("a", ("http://engine-of-a",), ())
        assert (await learner.expect(Request)).slots == 3
        learner.send(Stop("over"))
        assert await actor == 0
        await learner.expect(Bye)

    with_learner(test)


def test_no_more_groups_are_played_at_once_than_the_settings_say() -> None:
    async def test(learner: Learner) -> None:
        stage = Stage(gated=True)
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), stage.play))
        await learner.expect(Request)
        learner.send(Tickets(tuple(ticket(str(i), 2) for i in range(7))))
        hello = await learner.expect(Hello, lambda m: len(m.held) == 7)
        assert sorted(hello.held) == [str(i) for i in range(7)]
        await learner.expect(Hello)
        assert len(stage.running) == 6
        stage.gate.set()
        for _ in range(7):
            await learner.expect(Group)
        assert stage.most == 3
        learner.send(Stop("over"))
        assert await actor == 0

    with_learner(test)


def test_a_group_is_sent_again_until_it_is_received_and_kept_until_it_is_acknowledged() -> None:
    async def test(learner: Learner) -> None:
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), Stage().play))
        await learner.expect(Request)
        learner.send(Tickets((ticket("kept"), ticket("kept"))))
        for _ in range(3):
            assert (await learner.expect(Group)).ticket_id == "kept"
        await learner.expect(Hello, lambda m: m.held == ("kept",))
        learner.send(Receipt("kept", True))
        await learner.expect(Hello, lambda m: m.held == ("kept",))
        learner.send(Ack(("kept",)))
        await learner.expect(Hello, lambda m: m.held == ())
        learner.send(Stop("over"))
        assert await actor == 0

    with_learner(test)


def test_a_group_that_one_learner_process_took_is_sent_to_the_next_one() -> None:
    async def test(learner: Learner) -> None:
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), Stage().play))
        await learner.expect(Request)
        learner.send(Tickets((ticket("kept"),)))
        await learner.expect(Group)
        learner.send(Receipt("kept", True))
        await learner.expect(Hello, lambda m: m.held == ("kept",))
        await asyncio.sleep(0.5)
        while learner.socket.poll(0):
            assert not isinstance(decode(learner.socket.recv_multipart()[1:]), Group)
        learner.process_id = "second"
        assert (await learner.expect(Group)).ticket_id == "kept"
        learner.send(Stop("over"))
        assert await actor == 0

    with_learner(test)


def test_a_cancelled_ticket_is_no_longer_played_nor_sent() -> None:
    async def test(learner: Learner) -> None:
        stage = Stage(gated=True)
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), stage.play))
        await learner.expect(Request)
        learner.send(Tickets((ticket("void"), ticket("good"))))
        await learner.expect(Hello, lambda m: len(m.held) == 2)
        learner.send(Cancel(("void", "never heard of"), "test"))
        await learner.expect(Hello, lambda m: m.held == ("good",))
        assert stage.cancelled == ["void"]
        stage.gate.set()
        assert (await learner.expect(Group)).ticket_id == "good"
        learner.send(Stop("over"))
        assert await actor == 0

    with_learner(test)


def test_an_actor_finds_a_restarted_learner_by_itself(tmp_path: Path) -> None:
    first = start_intake(tmp_path)

    async def main() -> None:
        actor = asyncio.create_task(run_actor(actor_settings(first.address), Stage().play))
        first.open()
        seeds = [t.sample.metadata["seed"] for t, _ in await asyncio.to_thread(first.next_batch, 4, 10.0)]
        state = first.state_dict()
        # a learner that dies says nothing: its socket closes without a farewell
        first._part = lambda reason: None  # type: ignore[method-assign]
        first.stop("killed")
        second = start_intake(tmp_path, address=first.address)
        try:
            second.load_state(state)
            second.open(version=1)
            batch = await asyncio.to_thread(second.next_batch, 4, 10.0)
            seeds += [t.sample.metadata["seed"] for t, _ in batch]
            assert len(seeds) == len(set(seeds)) == 8
            assert set(seeds) <= set(range(12))
        finally:
            await asyncio.to_thread(second.stop, "over")
        assert await actor == 0

    asyncio.run(asyncio.wait_for(main(), 30))


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
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), Stage().play))
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
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), broken))
        await learner.expect(Request)
        learner.send(Tickets((ticket("t"),)))
        with pytest.raises(ExceptionGroup) as caught:
            await actor
        assert caught.group_contains(ZeroDivisionError)
        assert (await learner.expect(Bye)).reason == "failed"

    with_learner(test)


def test_a_cancelled_actor_cancels_its_episodes_and_says_goodbye() -> None:
    async def test(learner: Learner) -> None:
        stage = Stage(gated=True)
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), stage.play))
        await learner.expect(Request)
        learner.send(Tickets((ticket("t"),)))
        await learner.expect(Hello, lambda m: m.held == ("t",))
        actor.cancel()
        with pytest.raises(asyncio.CancelledError):
            await actor
        assert stage.cancelled == ["t"]
        assert (await learner.expect(Bye)).reason == "asked to stop"

    with_learner(test)


def test_an_episode_that_breaks_the_contract_or_does_not_fit_is_sent_as_a_failure() -> None:
    async def play(ticket: Ticket, index: int) -> Trajectory:
        return episode(images=()) if ticket.id == "broken" else episode(picture=os.urandom(100_000))

    async def test(learner: Learner) -> None:
        settings = actor_settings(learner.address, sockets=SocketSettings(max_message_bytes=50_000))
        actor = asyncio.create_task(run_actor(settings, play))
        await learner.expect(Request)
        for name, word in (("broken", "placeholders"), ("large", "50000")):
            learner.send(Tickets((ticket(name),)))
            group = await learner.expect(Group, lambda g, name=name: g.ticket_id == name)
            assert group.trajectories[0].ending is Ending.WIRE_ERROR
            assert word in group.trajectories[0].error
            learner.send(Receipt(name, False, "wire_error"))
        learner.send(Stop("over"))
        assert await actor == 0

    with_learner(test)


def test_an_actor_ends_with_an_error_when_the_learner_failed() -> None:
    async def test(learner: Learner) -> None:
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), Stage().play))
        await learner.expect(Request)
        learner.send(Welcome("run", 0, "p"))
        learner.send(Stop("the learner failed", failed=True))
        assert await actor == 1

    with_learner(test)


def test_idleness_is_the_share_of_time_without_an_episode() -> None:
    async def test(learner: Learner) -> None:
        stage = Stage(gated=True)
        actor = asyncio.create_task(run_actor(actor_settings(learner.address), stage.play))
        await learner.expect(Hello, lambda m: m.idle_frac == 1.0)
        await learner.expect(Request)
        learner.send(Tickets((ticket("t"),)))
        await learner.expect(Hello, lambda m: m.idle_frac == 0.0)
        learner.send(Stop("over"))
        assert await actor == 0

    with_learner(test)
