"""A traced ticket's group brings its spans, by the learner's clock; nothing about them costs an episode."""

from __future__ import annotations

import time

from msgspec.structs import replace

from shared.spans import add_span, span, unpacked_spans
from shared.types import Group, Refusal, Request, Ticket, Tickets, Trajectory
from shared.wire.endpoints import EndpointSettings
from tests.support.actor_rig import Learner, dismiss, start, start_with, ticket, with_learner
from tests.support.wires import episode


async def play(ticket: Ticket, index: int) -> Trajectory:
    with span("turn", note="1"):
        return episode()


def traced(name: str, group_size: int = 2) -> Ticket:
    return replace(ticket(name, group_size), traced=True)


@with_learner
async def test_a_traced_tickets_group_brings_its_spans_and_no_other_does(learner: Learner) -> None:
    began = time.monotonic()
    actor = await start_with(learner, play, traced("t"), ticket("u"))
    groups = {group.ticket_id: group for group in (await learner.expect(Group), await learner.expect(Group))}
    spans, lost = unpacked_spans(groups["t"].spans)
    assert lost == 0 and groups["u"].spans == b""
    tracks = sorted((each.name, each.track) for each in spans)
    assert tracks == [
        *(("episode", f"episode {n}") for n in range(2)),
        ("group", "group"),
        *(("turn", f"episode {n}") for n in range(2)),
        ("wait for a place", "group"),
    ]
    assert all(began <= each.begin <= each.end <= time.monotonic() for each in spans)
    assert {each.note for each in spans if each.name != "turn"} == {"t"}
    await dismiss(learner, actor)


@with_learner
async def test_spans_of_another_host_have_the_learners_clock(learner: Learner) -> None:
    learner.clock, learner.ahead_s = "another host", 1e6
    actor = start(learner, play)
    await learner.expect(Request)
    await learner.expect(Request)  # it has had the answer to its first heartbeat
    learner.send(Tickets((traced("t"),)))
    before = time.monotonic()
    spans, _ = unpacked_spans((await learner.expect(Group)).spans)
    assert spans and all(abs(each.begin - 1e6 - before) < 1000 for each in spans)
    await dismiss(learner, actor)


@with_learner
async def test_a_group_that_is_too_large_with_its_spans_is_sent_without_them(learner: Learner) -> None:
    async def wordy(ticket: Ticket, index: int) -> Trajectory:
        for _ in range(1000):
            add_span("turn", 0.0, 1.0, note="x" * 100)
        return episode()

    actor = start(learner, wordy, endpoint=EndpointSettings(max_message_bytes=50_000))
    await learner.expect(Request)
    await learner.expect(Request)
    learner.send(Tickets((traced("t"),)))
    group = await learner.expect(Group)
    assert group.spans == b"" and all(each.trainable for each in group.trajectories)
    learner.send(Refusal("t", "seen"))
    await dismiss(learner, actor)
