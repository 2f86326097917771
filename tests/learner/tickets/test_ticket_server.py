"""The ticket server issues tickets and gathers groups, over real sockets and with its real thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.tickets.protocol import RECEIPTS_PER_MESSAGE, TicketProtocol, TicketServerSettings
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import TicketBook
from learner.tickets.ticket_server import TicketServer
from shared.types import Ack, Bye, Cancel, Group, Receipt, Refusal, Sampling, Stop, Tickets, Welcome
from tests.support.machine import until
from tests.support.schedules import Wire
from tests.support.tickets.server_rig import Peer, opened, peer, ticket_server
from tests.support.wires import RULES, book_settings, failed_episode, group_of, start_ticket_server

__all__ = ["opened", "peer", "ticket_server"]  # fixtures


def raises(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_tickets_groups_and_acknowledgments_make_a_batch(ticket_server: TicketServer, peer: Peer) -> None:
    peer.hello()
    welcome = peer.expect(Welcome)
    assert (welcome.run_id, welcome.version) == ("run-1", 0)
    assert peer.receive(0.3) is None  # no engine has weights yet
    ticket_server.open()
    tickets = peer.tickets(4)
    for ticket in tickets:
        peer.send(group_of(ticket))
        assert peer.expect(Receipt) == Receipt((ticket.id,))
    batch = ticket_server.next_batch(4, 5.0)
    peer.hello(*(t.id for t in tickets))
    peer.expect(Welcome)
    assert not isinstance(peer.receive(0.3), Ack | Cancel)
    ticket_server.commit()
    assert peer.expect(Ack) == Ack(tuple(t.id for t in tickets))
    assert [t for t, _ in batch] == tickets
    assert all(g.ticket_id == t.id for t, g in batch)
    metrics = ticket_server.metrics()
    assert metrics["tickets/trained"] == 4
    assert metrics["staleness/token/max"] == 0
    assert metrics["actors/idle_frac"] == 0.5
    assert ticket_server.engines() == {"http://p"}


def test_an_actor_holds_no_more_tickets_than_it_has_places(ticket_server: TicketServer, peer: Peer) -> None:
    ticket_server.open()
    peer.slots = 2
    peer.hello()
    first = peer.tickets(2)
    peer.hello(*(t.id for t in first))
    peer.expect(Welcome)
    assert peer.receive(0.4) is None
    peer.send(group_of(first[0]))
    assert len(peer.tickets(1)) == 1


def test_a_publication_frees_tickets_at_once(ticket_server: TicketServer, peer: Peer) -> None:
    ticket_server.open()
    peer.slots = 100
    peer.hello()
    tickets = peer.tickets(8)
    for ticket in tickets:
        peer.send(group_of(ticket))
    ticket_server.next_batch(4, 5.0)
    ticket_server.set_version(1)
    assert [t.version for t in peer.tickets(4)] == [1] * 4


def test_groups_that_became_too_old_are_counted_as_dropped_by_the_meter_of_selection(
    ticket_server: TicketServer, peer: Peer
) -> None:
    ticket_server.open(3)
    peer.hello()
    old, *others = peer.tickets(4)
    peer.send(group_of(old, version=0))
    for ticket in others:
        peer.send(group_of(ticket, version=3))
    assert [ticket for ticket, _ in ticket_server.next_batch(3, 5.0)] == others
    metrics = ticket_server.metrics()
    assert metrics["tickets/dropped/stale"] == metrics["selection/episodes/dropped"] == 1
    assert metrics["selection/episodes/finished"] == 4 and metrics["selection/episodes/trained"] == 3
    assert ticket_server._protocol.health.failed_share("p") == 1 / 5  # four sound episodes, and the group that is stale


def test_work_is_spread_over_the_actors_though_they_have_one_name(ticket_server: TicketServer, opened: list) -> None:
    opened += (peers := [Peer(ticket_server.address, "twin", number=number) for number in range(2)])
    for one in peers:
        one.hello()
        one.expect(Welcome)
    until(lambda: ticket_server.metrics()["actors/known"] == 2)
    ticket_server.open()
    first, second = (one.tickets(4) for one in peers)
    assert len(first) == len(second) == 4
    assert not {t.id for t in first} & {t.id for t in second}


def test_a_group_sent_twice_is_trained_once(ticket_server: TicketServer, peer: Peer) -> None:
    ticket_server.open()
    peer.hello()
    tickets = peer.tickets(4)
    for ticket in (*tickets, *tickets):
        peer.send(group_of(ticket))
    assert peer.taken(8) == [ticket.id for ticket in (*tickets, *tickets)]
    assert len(ticket_server.next_batch(4, 5.0)) == 4
    ticket_server.commit()
    for ticket in tickets:
        peer.send(group_of(ticket))
        assert peer.expect(Refusal) == Refusal(ticket.id, "duplicate")
    with pytest.raises(TimeoutError):
        ticket_server.next_batch(1, 0.1)
    assert ticket_server.metrics()["tickets/refused/duplicate"] == 4


@pytest.mark.slow
def test_what_a_leaving_or_silent_actor_held_goes_to_another_one(tmp_path: Path, opened: list) -> None:
    ticket_server = start_ticket_server(tmp_path, timeout_s=1.5)
    opened.append(ticket_server)
    ticket_server.open()
    opened += (peers := [Peer(ticket_server.address, name, slots=8) for name in "abc"])
    first, second, third = peers
    first.hello()
    tickets = first.tickets(8)
    first.send(Bye("had enough"))
    second.hello()
    assert second.tickets(8) == tickets
    third.hello()  # the second one stays silent from now on, the third one does not
    deadline = time.monotonic() + 30
    while (message := third.receive(0.1)) is None or not isinstance(message, Tickets):
        third.hello()
        assert time.monotonic() < deadline
    assert message.tickets == tuple(tickets)
    assert ticket_server.metrics()["tickets/reissued"] == 16


def test_the_slower_actor_of_a_ticket_is_told_to_stop(tmp_path: Path, opened: list) -> None:
    ticket_server = start_ticket_server(tmp_path, lease_s=0.2)
    opened.append(ticket_server)
    ticket_server.open()
    slow, fast = peers = [Peer(ticket_server.address, name, slots=8) for name in "sf"]
    opened += peers
    slow.hello()
    ticket = slow.tickets(8)[0]
    fast.hello()
    assert ticket in fast.tickets(8)
    fast.send(group_of(ticket))
    assert slow.expect(Cancel) == Cancel((ticket.id,), "another actor was faster")


def test_an_evaluation_is_gathered_beside_the_training(ticket_server: TicketServer, peer: Peer) -> None:
    ticket_server.open()
    peer.slots = 20
    peer.hello()
    peer.tickets(8)
    held_out = SeedSource(900)
    ticket_server.start_evaluation("after", [held_out.sample(i) for i in range(3)], Sampling(temperature=0.0))
    tickets = peer.tickets(3)
    for ticket in tickets:
        peer.send(group_of(ticket))
    result = ticket_server.evaluation_result("after", 5.0)
    assert [t.sample.metadata["seed"] for t, _ in result.groups] == [900, 901, 902]
    assert ticket_server.metrics()["tickets/trained"] == 0


def test_a_wait_without_end_names_whom_it_waited_for(ticket_server: TicketServer, peer: Peer) -> None:
    with pytest.raises(TimeoutError, match="no actor is here"):
        ticket_server.next_batch(1, 0.1)
    peer.hello()
    peer.expect(Welcome)
    with pytest.raises(TimeoutError, match="no engine has weights"):
        ticket_server.next_batch(1, 0.1)
    ticket_server.open()
    ticket = peer.tickets(4)[0]
    peer.send(Group(ticket.id, "p", (failed_episode(error="the moon is down"),)))
    peer.expect(Refusal)
    with pytest.raises(TimeoutError, match=r"1 groups.*p#1 holds 4 tickets.*the moon is down") as caught:
        ticket_server.next_batch(1, 0.2)
    assert "\n" not in str(caught.value)


def test_groups_without_a_sound_episode_are_kept_for_the_recorder_the_last_ones(
    ticket_server: TicketServer, peer: Peer
) -> None:
    ticket_server.open()
    peer.hello()
    tickets = peer.tickets(4)
    for ticket in tickets[:3]:
        peer.send(Group(ticket.id, "p", (failed_episode(error=f"no {ticket.id}"),)))
        peer.expect(Refusal)
    peer.send(group_of(tickets[3]))
    peer.taken(1)
    kept = ticket_server.take_failed()  # two of them at most: see start_ticket_server
    assert [(ticket, group.ticket_id) for ticket, group, _ in kept] == [(t, t.id) for t in tickets[1:3]]
    assert [reason for _, _, reason in kept] == [f"env_error: no {t.id}" for t in tickets[1:3]]
    assert ticket_server.take_failed() == []
    metrics = ticket_server.metrics()
    assert (metrics["arrived/failed"], metrics["arrived/ending/env_error"]) == (0.75, 0.75)
    assert metrics["arrived/ending/aborted"] == 0.0 and "arrived/failed" not in ticket_server.metrics()


def test_a_sample_that_cannot_be_sent_stops_the_run_with_its_name(tmp_path: Path, opened: list) -> None:
    ticket_server = start_ticket_server(tmp_path)
    peer = Peer(ticket_server.address)
    opened += [ticket_server, peer]
    ticket_server.start_evaluation("e", [SeedSource(prompt=({"role": object()},)).sample(0)], Sampling())
    ticket_server.open()
    peer.hello()
    with pytest.raises(RuntimeError, match=r"prompt.*'role'. is object"):
        ticket_server.next_batch(1, 5.0)


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_actors_are_told_when_the_thread_fails_is_for_the_learner_to_say(
    ticket_server: TicketServer, peer: Peer, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    peer.hello()
    peer.expect(Welcome)
    monkeypatch.setattr(ticket_server._protocol, "tick", raises(MemoryError("once")))
    with pytest.raises(RuntimeError, match="once"):
        ticket_server.next_batch(1, 5.0)
    assert peer.receive(0.3) is None
    if comes_back:
        ticket_server.go_silently()
        assert peer.receive(0.3) is None
    else:
        ticket_server.stop("the learner failed", failed=True)
        assert peer.expect(Stop) == Stop("the learner failed", failed=True)


def test_a_result_that_is_there_is_not_lost_to_a_shutdown(ticket_server: TicketServer, peer: Peer) -> None:
    ticket_server.start_evaluation("e", [SeedSource().sample(0)], Sampling())
    ticket_server.open()
    peer.hello()
    peer.send(group_of(peer.tickets(1)[0]))
    until(lambda: not ticket_server.evaluation_left("e"))
    shutdown = threading.Event()
    shutdown.set()
    assert len(ticket_server.evaluation_result("e", 5.0, shutdown).groups) == 1


def test_stop_reaches_every_actor_and_may_be_said_twice(ticket_server: TicketServer, peer: Peer) -> None:
    peer.hello()
    peer.expect(Welcome)
    ticket_server.stop("700 steps done")
    ticket_server.stop("again")
    assert peer.expect(Stop) == Stop("700 steps done")
    with pytest.raises(RuntimeError, match="700 steps done"):
        ticket_server.next_batch(1, 1.0)


def test_two_learners_do_not_share_a_port(ticket_server: TicketServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in use"):
        start_ticket_server(tmp_path, address=ticket_server.address)


def test_groups_that_come_together_get_receipts_together_and_the_last_ones_none_later_than_the_next_tick() -> None:
    wire, settings = Wire(), TicketServerSettings("", Path("/nonexistent"), "run", RULES)
    wire.present |= {"a", "b"}
    book = TicketBook(SeedSource(), book_settings(), nonce="p")
    protocol = TicketProtocol(wire, book, settings)  # type: ignore[arg-type]
    for number in range(RECEIPTS_PER_MESSAGE + 1):
        protocol.confirm(b"a", f"{number}")
    protocol.confirm(b"b", "other")
    together = tuple(map(str, range(RECEIPTS_PER_MESSAGE)))
    assert wire.to_actors == [("a", Receipt(together))]
    protocol.tick(drained=True)
    rest = [("a", Receipt((str(RECEIPTS_PER_MESSAGE),))), ("b", Receipt(("other",)))]
    assert sorted(wire.to_actors[1:], key=str) == rest
    protocol.tick(drained=True)
    assert len(wire.to_actors) == 3
