"""The actor's loop against the real ticket server, and against a learner that loses, cancels, falls silent or stops."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actor.actor_loop import run_actor
from learner.tickets.sources import SeedSource
from shared.log import get_logger
from shared.types import (
    Ack,
    Bye,
    Cancel,
    Ending,
    Group,
    Hello,
    Receipt,
    Refusal,
    Request,
    Sampling,
    Stop,
    Ticket,
    Tickets,
    Trajectory,
    Welcome,
)  # fmt: skip
from shared.wire.codec import decode
from shared.wire.endpoints import EndpointSettings
from tests.support.actor_rig import Learner, Stage, dismiss, start, start_with, ticket, with_learner
from tests.support.wires import actor_settings, episode, start_ticket_server

get_logger("a")  # caplog hears the loggers that are there when a test begins


def test_actors_fill_batches_until_the_learner_says_stop(tmp_path: Path) -> None:
    ticket_server = start_ticket_server(tmp_path, group_size=2)
    stage_of: dict[str, Stage] = {}

    def learn() -> list[int]:
        while len(ticket_server.engines()) < 2:
            time.sleep(0.01)
        ticket_server.open()
        seeds = []
        for version in range(6):
            batch = ticket_server.next_batch(4, 10.0)
            seeds += [t.sample.metadata["seed"] for t, _ in batch]
            assert all([t.reward for t in g.trajectories] == [0.0, 1.0] for _, g in batch)
            ticket_server.set_version(version + 1)
        ticket_server.start_evaluation("end", [SeedSource(900).sample(i) for i in range(7)], Sampling(), group_size=3)
        result = ticket_server.evaluation_result("end", 10.0)
        assert [len(g.trajectories) for _, g in result.groups] == [3] * 7
        assert ticket_server.engines() == {"http://engine-of-a", "http://engine-of-b"}
        ticket_server.stop("enough")
        return seeds

    async def main() -> None:
        loop = asyncio.get_running_loop()
        learned = loop.run_in_executor(None, learn)
        actors = []
        for name in "ab":
            stage_of[name] = Stage()
            actors.append(
                asyncio.create_task(run_actor(actor_settings(ticket_server.address, name), stage_of[name].play))
            )
        seeds = await learned
        assert len(seeds) == len(set(seeds)) == 24
        assert set(seeds) <= set(range(28))
        assert await asyncio.gather(*actors) == [0, 0]

    try:
        asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        ticket_server.stop("test over")
    assert all(0 < stage.most <= 3 for stage in stage_of.values())
    assert ticket_server.max_staleness_seen <= 1


@with_learner
async def test_an_actor_says_who_it_is_and_how_much_it_plays_at_once(learner: Learner) -> None:
    actor = start(learner, Stage().play)
    hello = await learner.expect(Hello)
    assert (hello.actor, hello.engine_urls, hello.held) == ("a", ("http://engine-of-a",), ())
    assert (await learner.expect(Request)).slots == 3
    await dismiss(learner, actor)
    await learner.expect(Bye)


def test_refusals_for_one_reason_are_one_line_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    @with_learner
    async def refuse(learner: Learner) -> None:
        actor = await start_with(learner, Stage().play, *(ticket(str(i)) for i in range(24)))
        for _ in range(24):
            learner.send(Refusal((await learner.expect(Group)).ticket_id, "env_error: the board is lost"))
        await learner.expect(Hello, lambda m: m.held == ())
        await dismiss(learner, actor)

    refuse()
    lines = [line for line in caplog.messages if "env_error" in line]
    assert "the learner refused the group of ticket" in lines[0]
    assert len(lines) == 2 and "23 more of" in lines[1]


@pytest.mark.parametrize("error", ["cannot be sent", "breaks the contract"])
def test_episodes_that_cannot_be_sent_are_one_line_and_a_count(caplog: pytest.LogCaptureFixture, error: str) -> None:
    bad = episode(text="x" * (2**22 + 1)) if error == "cannot be sent" else episode(reward=math.nan)

    async def play(ticket: Ticket, index: int) -> Trajectory:
        return bad

    @with_learner
    async def receive(learner: Learner) -> None:
        actor = await start_with(learner, play, *(ticket(str(i)) for i in range(12)))
        for _ in range(12):
            group = await learner.expect(Group)
            assert [t.ending for t in group.trajectories] == [Ending.WIRE_ERROR]
            learner.send(Receipt((group.ticket_id,)))
        await dismiss(learner, actor)

    receive()
    lines = [line for line in caplog.messages if error in line]
    assert len(lines) == 2 and "11 more of" in lines[1]


@with_learner
async def test_no_more_groups_are_played_at_once_than_the_settings_say(learner: Learner) -> None:
    stage = Stage(gated=True)
    actor = await start_with(learner, stage.play, *(ticket(str(i), 2) for i in range(7)))
    hello = await learner.expect(Hello, lambda m: len(m.held) == 7)
    assert sorted(hello.held) == [str(i) for i in range(7)]
    await learner.expect(Hello)
    assert len(stage.running) == 6
    stage.gate.set()
    for _ in range(7):
        await learner.expect(Group)
    assert stage.most == 3
    await dismiss(learner, actor)


@with_learner
async def test_a_group_is_sent_again_until_it_is_received_and_kept_until_it_is_acknowledged(learner: Learner) -> None:
    actor = await start_with(learner, Stage().play, ticket("kept"), ticket("kept"))
    for _ in range(3):
        assert (await learner.expect(Group)).ticket_id == "kept"
    await learner.expect(Hello, lambda m: m.held == ("kept",))
    learner.send(Receipt(("kept",)))
    await learner.expect(Hello, lambda m: m.held == ("kept",))
    learner.send(Ack(("kept",)))
    await learner.expect(Hello, lambda m: m.held == ())
    await dismiss(learner, actor)


@with_learner
async def test_a_group_that_one_learner_process_took_is_sent_to_the_next_one(learner: Learner) -> None:
    actor = await start_with(learner, Stage().play, ticket("kept"))
    await learner.expect(Group)
    learner.send(Receipt(("kept",)))
    await learner.expect(Hello, lambda m: m.held == ("kept",))
    await asyncio.sleep(0.5)
    while learner.socket.poll(0):
        assert not isinstance(decode(learner.socket.recv_multipart()[1:]), Group)
    learner.process_id = "second"
    assert (await learner.expect(Group)).ticket_id == "kept"
    await dismiss(learner, actor)


@with_learner
async def test_a_cancelled_ticket_is_no_longer_played_nor_sent(learner: Learner) -> None:
    stage = Stage(gated=True)
    actor = await start_with(learner, stage.play, ticket("void"), ticket("good"))
    await learner.expect(Hello, lambda m: len(m.held) == 2)
    learner.send(Cancel(("void", "never heard of"), "test"))
    await learner.expect(Hello, lambda m: m.held == ("good",))
    assert stage.cancelled == ["void"]
    stage.gate.set()
    assert (await learner.expect(Group)).ticket_id == "good"
    await dismiss(learner, actor)


def test_an_actor_finds_a_restarted_learner_by_itself(tmp_path: Path) -> None:
    first = start_ticket_server(tmp_path)

    async def main() -> None:
        actor = asyncio.create_task(run_actor(actor_settings(first.address), Stage().play))
        first.open()
        seeds = [t.sample.metadata["seed"] for t, _ in await asyncio.to_thread(first.next_batch, 4, 10.0)]
        state = first.state_dict()
        first.go_silently()  # as one that dies
        second = start_ticket_server(tmp_path, address=first.address)
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


@with_learner
async def test_an_episode_that_breaks_the_contract_or_does_not_fit_is_sent_as_a_failure(learner: Learner) -> None:
    async def play(ticket: Ticket, index: int) -> Trajectory:
        return episode(images=()) if ticket.id == "broken" else episode(image=os.urandom(100_000))

    actor = start(learner, play, endpoint=EndpointSettings(max_message_bytes=50_000))
    await learner.expect(Request)
    for name, word in (("broken", "placeholders"), ("large", "50000")):
        learner.send(Tickets((ticket(name),)))
        group = await learner.expect(Group, lambda g, name=name: g.ticket_id == name)
        assert group.trajectories[0].ending is Ending.WIRE_ERROR
        assert word in group.trajectories[0].error
        learner.send(Refusal(name, "wire_error"))
    await dismiss(learner, actor)


@with_learner
async def test_one_unsound_episode_of_a_group_costs_no_other(learner: Learner) -> None:
    tuples = tuple((turn.start, turn.end, turn.reward) for turn in episode().turns)
    unsound: tuple[dict[str, Any], ...] = ({}, {"metrics": {"x": math.nan}}, {"error": "a\udcff"}, {"turns": tuples})

    async def play(ticket: Ticket, index: int) -> Trajectory:
        return replace(episode(), **unsound[index])

    actor = start(learner, play)
    await learner.expect(Request)
    learner.send(Tickets((ticket("t", group_size=4),)))
    group = await learner.expect(Group)
    assert [t.ending for t in group.trajectories] == [Ending.COMPLETED, *[Ending.WIRE_ERROR] * 3]
    assert "AttributeError" in group.trajectories[3].error
    learner.send(Refusal("t", "wire_error"))
    await dismiss(learner, actor)


@with_learner
async def test_idleness_is_the_share_of_time_without_an_episode(learner: Learner) -> None:
    stage = Stage(gated=True)
    actor = start(learner, stage.play)
    await learner.expect(Hello, lambda m: m.idle_frac == 1.0)
    await learner.expect(Request)
    learner.send(Tickets((ticket("t"),)))
    await learner.expect(Hello, lambda m: m.idle_frac == 0.0)
    await dismiss(learner, actor)


# ------------------------------------------------------------------ how an actor ends


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


@with_learner
async def test_a_learner_that_refuses_the_actor_ends_it_with_an_error(learner: Learner) -> None:
    actor = start(learner, Stage().play)
    while not learner.socket.poll(0):
        await asyncio.sleep(0.01)
    learner.peer = learner.socket.recv_multipart()[0]
    learner.send(Stop("another vocabulary"))
    assert await actor == 1


@with_learner
async def test_an_error_in_play_ends_the_actor_and_says_goodbye(learner: Learner) -> None:
    async def broken(ticket: Ticket, index: int) -> Trajectory:
        raise ZeroDivisionError("a bug, not an ending")

    actor = await start_with(learner, broken, ticket("t"))
    with pytest.raises(ExceptionGroup) as caught:
        await actor
    assert caught.group_contains(ZeroDivisionError)
    assert (await learner.expect(Bye)).reason == "failed"


@with_learner
async def test_a_cancelled_actor_cancels_its_episodes_and_says_goodbye(learner: Learner) -> None:
    stage = Stage(gated=True)
    actor = await start_with(learner, stage.play, ticket("t"))
    await learner.expect(Hello, lambda m: m.held == ("t",))
    actor.cancel()
    with pytest.raises(asyncio.CancelledError):
        await actor
    assert stage.cancelled == ["t"]
    assert (await learner.expect(Bye)).reason == "asked to stop"


@with_learner
async def test_an_actor_ends_with_an_error_when_the_learner_failed(learner: Learner) -> None:
    actor = start(learner, Stage().play)
    await learner.expect(Request)
    learner.send(Welcome("run", 0, "p"))
    learner.send(Stop("the learner failed", failed=True))
    assert await actor == 1


@with_learner
async def test_a_group_that_the_next_learner_process_did_not_get_is_sent_to_it_again(learner: Learner) -> None:
    """The first sending to the new process is lost; that the old one had taken the group does not count."""
    actor = await start_with(learner, Stage().play, ticket("kept"))
    await learner.expect(Group)
    learner.send(Receipt(("kept",)))
    await learner.expect(Hello, lambda m: m.held == ("kept",))
    learner.process_id = "second"
    for _ in range(3):
        assert (await learner.expect(Group)).ticket_id == "kept"
    await dismiss(learner, actor)
