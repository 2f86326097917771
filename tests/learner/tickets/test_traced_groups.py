"""Tickets are traced while the learner says so, and whatever a group brings as its spans, the group counts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from learner.tickets.ticket_server import TicketServer
from shared.spans import Span, SpanBuffer, packed_spans
from tests.support.tickets.server_rig import Peer, opened, peer, ticket_server
from tests.support.wires import group_of

__all__ = ["opened", "peer", "ticket_server"]
SPANS = packed_spans(SpanBuffer(spans=[Span("turn", 0.0, 1.0)]), 0.0)


def test_tickets_are_traced_only_while_the_learner_says_so(ticket_server: TicketServer, peer: Peer) -> None:
    ticket_server.open()
    peer.hello()
    assert not any(ticket.traced for ticket in peer.tickets(4))
    ticket_server.trace(new=True, kept=True)
    peer.slots = 8
    peer.hello()
    assert all(ticket.traced for ticket in peer.tickets(4))


@pytest.mark.parametrize("spans", [SPANS, b"", b"\xc1", bytes(range(256)) * 4])
def test_a_group_counts_whatever_its_spans_are(ticket_server: TicketServer, peer: Peer, spans: bytes) -> None:
    ticket_server.trace(new=True, kept=True)
    ticket_server.open()
    peer.hello()
    for ticket in peer.tickets(4):
        peer.send(replace(group_of(ticket), spans=spans))
    assert len(ticket_server.next_batch(4, 10.0)) == 4
    assert ticket_server.take_traces() == [("p", spans)] * (4 if spans else 0)
    assert ticket_server.take_traces() == []


def test_spans_that_nobody_wants_are_not_kept(ticket_server: TicketServer, peer: Peer) -> None:
    ticket_server.open()
    peer.hello()
    for ticket in peer.tickets(4):
        peer.send(replace(group_of(ticket), spans=SPANS))
    assert len(ticket_server.next_batch(4, 10.0)) == 4
    assert ticket_server.take_traces() == []
