"""What an engine with wrong weights may have sampled is refused, counted and played again; what others bring is not."""

from __future__ import annotations

from shared.types import Receipt, Refusal, Tickets, Welcome
from tests.support.tickets.server_rig import opened, peer, ticket_server
from tests.support.wires import group_of

__all__ = ["opened", "peer", "ticket_server"]  # fixtures


def test_groups_of_an_engine_with_wrong_weights_are_refused_and_their_tickets_issued_again(ticket_server, peer):
    ticket_server.open(3)
    peer.hello()
    first, second, third, fourth = peer.tickets(4)
    peer.send(group_of(first, 3))
    assert peer.expect(Receipt).ticket_ids == (first.id,)
    ticket_server.refuse_engine("http://p", 2, 3)  # what waits for its step goes
    refusals, issued = [], []
    for ticket, version in ((second, 3), (third, 2)):
        peer.send(group_of(ticket, version))
    while len(refusals) < 2 or len(issued) < 3:
        message = peer.receive()
        assert message is not None
        refusals += [message] if isinstance(message, Refusal) else []
        issued += message.tickets if isinstance(message, Tickets) else []
    assert refusals == [Refusal(second.id, "unproven"), Refusal(third.id, "unproven")]
    ticket_server.set_version(4)
    peer.send(group_of(fourth, 4))  # sampled after it was taken back
    assert peer.expect(Receipt).ticket_ids == (fourth.id,)
    metrics = ticket_server.metrics()
    assert (metrics["tickets/refused/unproven"], metrics["tickets/dropped/unproven"]) == (2, 1)
    assert metrics["queue/ready_groups"] == 1
    again = [ticket.sample.id for ticket in issued]
    assert {second.sample.id, third.sample.id} <= set(again) and first.sample.id not in again


def test_an_actor_with_other_engines_loses_nothing(ticket_server, peer):
    ticket_server.open(3)
    peer.hello()
    peer.expect(Welcome)
    (first, *_) = peer.tickets(4)
    ticket_server.refuse_engine("http://elsewhere", 0, 9)
    peer.send(group_of(first, 3))
    assert peer.expect(Receipt).ticket_ids == (first.id,)
    assert ticket_server.metrics()["queue/ready_groups"] == 1
