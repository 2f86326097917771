"""A share of failed episodes: below it the run goes on, beyond it the run stops and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.tickets.failure_rate import TooManyFailures
from learner.tickets.server import TicketServer, TicketServerSettings
from learner.tickets.sources import SeedSource
from shared.types import Group
from tests.support.intake_rig import Peer, opened
from tests.support.wires import RULES, book_settings, failed_episode, group_of

__all__ = ["opened"]  # a fixture


@pytest.fixture
def half_may_fail(tmp_path: Path, opened: list) -> tuple[TicketServer, Peer]:
    """An open intake that bears half of its episodes to fail, and an actor with 64 places."""
    settings = TicketServerSettings("tcp://127.0.0.1:*", tmp_path, "run-1", RULES, max_failure_share=0.5)
    ticket_server = TicketServer(SeedSource(), book_settings(groups_per_version=100), settings)
    peer = Peer(ticket_server.address, slots=64)
    opened += [ticket_server, peer]
    ticket_server.open(0)
    peer.hello()
    return ticket_server, peer


def test_too_many_failed_episodes_stop_the_run_with_the_first_reason(half_may_fail: tuple[TicketServer, Peer]) -> None:
    ticket_server, peer = half_may_fail
    for number, ticket in enumerate(peer.tickets(64)):
        good = number < 30
        made = group_of(ticket) if good else Group(ticket.id, "p", (failed_episode(error=f"boom {number}"),))
        peer.send(made)
    with pytest.raises(TooManyFailures, match=r"env.max_failure_share = 0.5; the first: env_error: boom 30"):
        ticket_server.next_batch(60, timeout_s=10.0)


def test_failures_below_the_stated_share_do_not_stop_the_run(half_may_fail: tuple[TicketServer, Peer]) -> None:
    ticket_server, peer = half_may_fail
    for number, ticket in enumerate(peer.tickets(64)):
        peer.send(Group(ticket.id, "p", (failed_episode(),)) if number % 2 else group_of(ticket))
    assert len(ticket_server.next_batch(32, timeout_s=10.0)) == 32
