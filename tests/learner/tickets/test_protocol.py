"""What the learner answers to actors, without sockets: messages and times are the test's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from learner.tickets.member_health import FIRST_PAUSE_S, MIN_EPISODES, MemberHealth
from learner.tickets.protocol import LINES_OF_ONE_NAME, MAX_ACTORS, TicketProtocol, TicketServerSettings
from learner.tickets.ticket_records import MAX_HOLDERS
from shared.engine_urls import MAX_ENGINES
from shared.log import get_logger
from shared.types import Bye, Group, Hello, Request, Ticket, Tickets
from shared.wire.codec import Limits
from shared.wire.endpoints import Delivery
from tests.support.tickets.book_rig import Clock, make_book
from tests.support.wires import RULES, VOCAB, episode, failed_episode, group_of

PEER = b"a#1"
TIMEOUT_S = 10.0
get_logger("tickets")  # caplog hears the loggers that are there when a test begins


class Outbox:
    """The learner's endpoint, as far as it sends."""

    address = "memory"
    limits = Limits()

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, peer: bytes, message: Any) -> Delivery:
        self.sent.append(message)
        return Delivery.SENT

    def tickets(self) -> list[Ticket]:
        return [ticket for message in self.sent if isinstance(message, Tickets) for ticket in message.tickets]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def protocol(tmp_path: Path, clock: Clock, outbox: Outbox) -> TicketProtocol:
    settings = TicketServerSettings("", tmp_path, "run", RULES, TIMEOUT_S)
    made = TicketProtocol(outbox, make_book(clock), settings, clock)  # type: ignore[arg-type]
    made.issuing = True
    return made


def say(protocol: TicketProtocol, message: Any) -> None:
    protocol.answer(PEER, message, ())


def hello(*held: str) -> Hello:
    return Hello("a", ("http://e:1",), VOCAB, held)


def test_an_actor_is_not_silent_as_long_as_messages_wait_unread(protocol: TicketProtocol, clock: Clock) -> None:
    """Its own may be among them: the learner may have been busy for longer than the limit."""
    say(protocol, hello())
    clock.now = TIMEOUT_S + 1
    protocol.tick(drained=False)
    assert PEER in protocol.actors
    protocol.tick(drained=True)
    assert PEER not in protocol.actors


def test_an_actor_that_greets_again_has_the_slots_that_it_asked_for(protocol: TicketProtocol, outbox: Outbox) -> None:
    say(protocol, hello())
    say(protocol, Request(2))
    say(protocol, hello())  # a heartbeat, whose Request was lost
    protocol.tick(drained=True)
    assert len(outbox.tickets()) == 2


def from_actor(protocol: TicketProtocol, name: str, message: Any, process: int = 1) -> None:
    protocol.answer(f"{name}#{process}".encode(), message, ())


def test_an_actor_that_comes_and_goes_all_the_time_writes_a_few_lines_and_a_count(
    protocol: TicketProtocol, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for process in range(100):
        from_actor(protocol, "restless", Hello("restless", (), VOCAB), process)
        from_actor(protocol, "restless", Bye("for a moment"), process)
    from_actor(protocol, "calm", Hello("calm", (), VOCAB))
    assert len(caplog.messages) == 2 * LINES_OF_ONE_NAME + 1
    clock.now = 100.0
    protocol.tick(drained=False)
    assert sum(f"{100 - LINES_OF_ONE_NAME} more" in line for line in caplog.messages) == 2


def test_the_actors_that_are_known_are_bounded(protocol: TicketProtocol) -> None:
    for number in range(MAX_ACTORS + 10):
        from_actor(protocol, f"a{number}", Hello("a", (), VOCAB))
    assert len(protocol.actors) == MAX_ACTORS
    assert protocol.rejects.counts["too_many_actors"] == 10
    from_actor(protocol, "a0", Bye("done"))
    from_actor(protocol, "late", Hello("late", (), VOCAB))
    assert b"late#1" in protocol.actors


def test_actors_that_name_a_thousand_engines_each_do_not_hide_those_that_name_one(protocol: TicketProtocol) -> None:
    for number in range(20):
        urls = tuple(f"http://dead-{number}-{i}:1" for i in range(1000))
        from_actor(protocol, f"many{number}", Hello("many", urls, VOCAB))
    from_actor(protocol, "sound", Hello("sound", ("http://sound:1",), VOCAB))
    assert len(protocol.engines()) == MAX_ENGINES
    assert "http://sound:1" in protocol.engines()


def test_one_ticket_is_noted_for_a_few_actors_only_and_ends_all_the_same(
    protocol: TicketProtocol, outbox: Outbox
) -> None:
    say(protocol, hello())
    say(protocol, Request(1))
    protocol.tick(drained=True)
    (ticket,) = outbox.tickets()
    for number in range(50):
        from_actor(protocol, f"b{number}", Hello("b", (), VOCAB, (ticket.id,)))
    assert len(protocol._book.holders(ticket.id)) == MAX_HOLDERS
    from_actor(protocol, "a", group_of(ticket))
    assert protocol._book.ready == 1
    assert protocol._book.holders(ticket.id) == ()


@pytest.mark.parametrize("notices", [True, False], ids=["its connection is closed", "it comes back unnoticed"])
def test_an_actor_that_loses_its_ticket_each_time_does_not_keep_it_from_one_whose_episodes_fail_now_and_then(
    protocol: TicketProtocol, outbox: Outbox, clock: Clock, notices: bool
) -> None:
    """The ticket that it loses is the oldest one, for which every later step waits."""
    brought = Group("0-x", "sound", (failed_episode(error="the engine breaks off"), *[episode()] * 3))
    protocol.health.add("sound", brought, protocol.players)
    from_actor(protocol, "loses", Hello("loses", (), VOCAB))
    from_actor(protocol, "loses", Request(1))
    protocol.tick(drained=True)
    (ticket,) = outbox.tickets()
    if notices:
        protocol.forget(b"loses#1", "its connection is closed")
    clock.now = 6.0
    for actor in ("loses", "sound"):
        from_actor(protocol, actor, Hello(actor, ("http://e:1",), VOCAB))
        from_actor(protocol, actor, Request(1))
    protocol.tick(drained=True)
    assert protocol._book.holders(ticket.id) == ("sound#1",)


def test_an_actor_that_vanishes_with_its_ticket_stays_paused_when_it_comes_back(
    protocol: TicketProtocol, clock: Clock
) -> None:
    health = protocol.health = MemberHealth(0.5, get_logger("tickets"), clock)
    for process in range(MIN_EPISODES):
        for message in (Hello("loses", ("http://e:1",), VOCAB), Request(1)):
            from_actor(protocol, "loses", message, process)
        protocol.tick(drained=True)
        protocol.forget(f"loses#{process}".encode(), "its connection is closed")
    assert health.paused("loses")
    from_actor(protocol, "loses", Hello("loses", ("http://e:1",), VOCAB))
    assert not health.may_try("loses", alone=False)
    clock.now = FIRST_PAUSE_S
    assert health.may_try("loses", alone=False)
