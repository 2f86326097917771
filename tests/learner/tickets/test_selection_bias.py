"""Long episodes are trained in the proportion in which they are issued, and the meter says so, or that they are not."""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np
import pytest

from learner.tickets.protocol import TicketProtocol, TicketServerSettings
from learner.tickets.selection_bias import STAGES, SelectionMeter
from learner.tickets.ticket_book import TicketBook
from shared.types import Ending, Group, Hello, Request, Sample, Ticket, Tickets
from tests.support.schedules import Wire
from tests.support.wires import RULES, VOCAB, book_settings, episode, failed_episode

SLOW, TRAINED = 20, 640


class Mixed:
    """Three of ten samples are difficult: their episodes take twenty times as long."""

    def __init__(self) -> None:
        self.difficult = np.random.default_rng(0).random(10_000) < 0.3

    def sample(self, position: int) -> Sample:
        return Sample(str(position), metadata={"difficulty": float(self.difficult[position])})


def play(*, lose_difficult: bool) -> tuple[SelectionMeter, TicketBook]:
    """Two actors in simulated time; `lose_difficult`: their environments give up on half of the difficult samples."""
    now, playing, order = [0.0], list[tuple[float, int, bytes, Ticket]](), 0
    shape = book_settings(groups_per_version=8, max_staleness=2)
    book = TicketBook(Mixed(), shape, nonce="n", clock=lambda: now[0])
    wire = Wire()
    settings = TicketServerSettings("", Path("/nonexistent"), "r", RULES, actor_timeout_s=1e9)
    protocol = TicketProtocol(wire, book, settings, lambda: now[0])  # type: ignore[arg-type]
    protocol.issuing = True
    for actor in (b"a", b"b"):
        wire.present.add(actor.decode())
        protocol.answer(actor, Hello("a", (), VOCAB), ())
        protocol.answer(actor, Request(16), ())
    while book.trained < TRAINED:
        protocol.tick(drained=False)
        for key, message in wire.to_actors:
            for ticket in message.tickets if isinstance(message, Tickets) else ():
                order += 1
                seconds = SLOW if ticket.sample.metadata["difficulty"] else 1
                heapq.heappush(playing, (now[0] + seconds, order, key.encode(), ticket))
        wire.to_actors.clear()
        now[0], _, actor, ticket = heapq.heappop(playing)
        hard = bool(ticket.sample.metadata["difficulty"])
        lost = lose_difficult and hard and int(ticket.sample.id) % 2 == 0
        made = failed_episode(Ending.ENV_TIMEOUT) if lost else episode(book.version)
        protocol.answer(actor, Group(ticket.id, "a", (made,), float(SLOW if hard else 1)), ())
        for trained, group in book.take_groups(8) or ():
            protocol.selection.add("trained", trained, group)
        if book.trained >= 8 * (book.version + 1):
            book.commit()
            book.version += 1
    return protocol.selection, book


def test_episodes_that_take_twenty_times_as_long_are_trained_in_the_proportion_in_which_they_are_issued() -> None:
    meter, book = play(lose_difficult=False)
    assert not book.dropped
    values = meter.metrics()
    assert values["selection/issued/difficulty"] == pytest.approx(0.3, abs=0.05)
    assert abs(values["selection/shift/difficulty"]) < 0.03
    assert abs(values["selection/shift/group_s"]) < 0.03
    assert meter.episodes["issued"] == book.issued
    assert meter.episodes["trained"] == book.trained


def test_the_meter_shows_that_difficult_samples_are_lost() -> None:
    meter, book = play(lose_difficult=True)
    values = meter.metrics()
    assert values["selection/shift/difficulty"] < -0.2
    assert values["selection/shift/group_s"] < -0.2
    assert values["selection/dropped/difficulty"] == 1.0
    assert meter.episodes["dropped"] == book.dropped["env_timeout"] > 50
    rows = meter.table().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:6]] == list(STAGES)
    assert len({row.count("|") for row in rows}) == 1


def test_a_meter_that_has_seen_nothing_says_nothing() -> None:
    meter = SelectionMeter()
    assert set(meter.metrics()) == {f"selection/episodes/{stage}" for stage in STAGES}
    assert "nan" not in meter.table()
