"""What the ticket server refuses: malformed messages, strangers, actors of another model, too many failed episodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from learner.tickets.member_health import TooManyFailures
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.types import Cancel, Ending, Group, Hello, Receipt, Refusal, Stop, Trajectory, Welcome
from shared.wire.codec import encode
from tests.support.machine import until
from tests.support.tickets.server_rig import Peer, opened, peer, ticket_server
from tests.support.wires import RULES, VOCAB, book_settings, episode, failed_episode, group_of

__all__ = ["opened", "peer", "ticket_server"]  # fixtures


def test_what_an_actor_holds_of_another_run_is_void_and_its_group_is_refused(
    ticket_server: TicketServer, peer: Peer
) -> None:
    ticket_server.open()
    peer.hello()
    foreign = replace(peer.tickets(1)[0], id="0-0ther5un")
    peer.hello(foreign.id)
    assert peer.expect(Cancel) == Cancel((foreign.id,), "the learner has no use for these tickets")
    peer.send(group_of(foreign))
    assert peer.expect(Refusal) == Refusal(foreign.id, "unknown")
    metrics = ticket_server.metrics()
    assert metrics["tickets/refused/unknown"] == 1
    assert metrics["tickets/trained"] == metrics["tickets/dropped"] == metrics["queue/ready_groups"] == 0


def test_a_malformed_group_is_refused_counted_kept_and_its_sample_dropped(
    ticket_server: TicketServer, peer: Peer, tmp_path: Path
) -> None:
    ticket_server.open()
    peer.hello()
    ticket, other, third, fourth = peer.tickets(4)
    bad = episode(images=())  # a placeholder without its image
    peer.send(Group(ticket.id, "p", (bad,)))
    refusal = peer.expect(Refusal)
    assert refusal.ticket_id == ticket.id
    peer.send(Group(other.id, "p", (episode(token_ids=np.full(7, 1, np.int32)),)))
    peer.expect(Refusal)
    peer.socket.send_multipart([b"noise", b"noise"])
    peer.send(Stop("an actor has no say in this"))
    peer.send(Group(third.id, "p", (failed_episode(Ending.ENV_TIMEOUT, "reset took 30 s"),)))
    refusal = peer.expect(Refusal)
    assert "reset took 30 s" in refusal.reason
    peer.send(group_of(fourth))
    peer.expect(Receipt)
    metrics = ticket_server.metrics()
    assert metrics["tickets/dropped/malformed_placeholders"] == 2
    assert metrics["tickets/dropped/env_timeout"] == 1
    assert {r for r in metrics if r.startswith("wire/rejected/")} == {
        f"wire/rejected/{reason}" for reason in ("placeholders", "header", "wrong_direction")
    }
    kept = sorted((tmp_path / "rejected").glob("*.msgpack"))
    assert len(kept) == 4
    assert msgspec.msgpack.decode(kept[2].read_bytes())["frames"] == [b"noise", b"noise"]
    assert len(ticket_server.next_batch(1, 5.0)) == 1  # the run goes on


def test_a_group_that_was_damaged_on_its_way_may_be_sent_again(ticket_server: TicketServer, peer: Peer) -> None:
    """Not even its ticket's id is believed, so it costs no ticket."""
    ticket_server.open()
    peer.hello()
    ticket = peer.tickets(4)[0]
    frames = [bytes(frame) for frame in encode(group_of(ticket))]
    for place, frame in enumerate(frames[1:], 1):
        peer.socket.send_multipart([*frames[:place], frame[:-1] + bytes([frame[-1] ^ 4]), *frames[place + 1 :]])
    peer.send(group_of(ticket))
    assert peer.taken(1) == [ticket.id]
    metrics = ticket_server.metrics()
    assert metrics["wire/rejected/digest"] == 5  # four arrays and the digest itself
    assert metrics["wire/rejected/image_hash"] == 1
    assert metrics["tickets/dropped"] == 0


def test_only_the_last_twenty_rejected_messages_are_kept(
    ticket_server: TicketServer, peer: Peer, tmp_path: Path
) -> None:
    for _ in range(30):
        peer.socket.send_multipart([b"noise"])
    until(lambda: ticket_server.metrics()["wire/rejected"] == 30)
    assert len(list((tmp_path / "rejected").iterdir())) == 20


def test_a_stranger_cannot_close_the_ticket_of_another_actor(
    ticket_server: TicketServer, peer: Peer, opened: list
) -> None:
    ticket_server.open()
    peer.hello()
    ticket = peer.tickets(4)[0]
    stranger = Peer(ticket_server.address, "stranger")
    opened.append(stranger)
    stranger.send(Group(ticket.id, "p", (episode(images=()),)))
    stranger.expect(Refusal)
    assert ticket_server.metrics()["tickets/dropped"] == 0


def test_an_actor_of_another_vocabulary_or_schema_is_sent_away_with_the_reason(
    ticket_server: TicketServer, opened: list
) -> None:
    stranger, ancient = peers = [Peer(ticket_server.address, name) for name in "sa"]
    opened += peers
    stranger.hello(vocab_size=VOCAB + 1)
    assert stranger.receive(0.3) is None  # one message alone may have been damaged
    stranger.hello(vocab_size=VOCAB + 1)
    stop = stranger.expect(Stop)
    assert "model.path" in stop.reason
    for _ in range(2):
        ancient.socket.send_multipart([msgspec.msgpack.encode({"v": 999, "kind": "Hello", "body": []})])
    stop = ancient.expect(Stop)
    assert "999" in stop.reason
    assert ticket_server.metrics()["actors/known"] == 0


@pytest.mark.parametrize("urls", [("file:///etc/passwd",), ("http://a b",), ("",), ("http://e",) * 1025])
def test_an_actor_that_names_no_usable_engines_is_sent_away(
    ticket_server: TicketServer, opened: list, urls: tuple
) -> None:
    stranger = Peer(ticket_server.address, "stranger")
    opened.append(stranger)
    for _ in range(2):
        stranger.send(Hello("stranger", urls, VOCAB, (), 0.5))
    stop = stranger.expect(Stop)
    assert "engine" in stop.reason
    assert not ticket_server.engines()


def test_a_known_actor_stays_when_one_of_its_messages_is_damaged(ticket_server: TicketServer, peer: Peer) -> None:
    peer.hello()
    peer.expect(Welcome)
    for _ in range(3):
        peer.hello(vocab_size=VOCAB + 1)
        peer.socket.send_multipart([msgspec.msgpack.encode({"v": 66, "kind": "Hello", "body": []})])
    assert peer.receive(0.5) is None
    assert ticket_server.metrics()["actors/known"] == 1


# ------------------------------------------------------------------ episodes that fail


@pytest.fixture
def half_may_fail(tmp_path: Path, opened: list) -> tuple[TicketServer, Peer]:
    """An open ticket server that bears half of its episodes to fail, and an actor with 64 places."""
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


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (failed_episode(Ending.CONTEXT_FULL, ""), "context_full: the prompt and the first observation leave no room"),
        (episode(reward=1e30), "unusable: 1e30"),
    ],
)
def test_episodes_of_which_none_can_ever_be_trained_on_stop_the_run_with_the_cause(
    half_may_fail: tuple[TicketServer, Peer], monkeypatch: pytest.MonkeyPatch, made: Trajectory, reason: str
) -> None:
    def bounded(group: Group) -> None:
        if group.trajectories[0].reward > 1e6:
            raise ValueError("1e30 is beyond the bound of a reward")

    ticket_server, peer = half_may_fail
    settings = dataclasses.replace(ticket_server._protocol._settings, check=bounded)
    monkeypatch.setattr(ticket_server._protocol, "_settings", settings)
    for ticket in peer.tickets(40):
        peer.send(Group(ticket.id, "p", (made,)))
    with pytest.raises(TooManyFailures, match=reason):
        ticket_server.next_batch(1, timeout_s=10.0)


def test_failures_below_the_stated_share_do_not_stop_the_run(half_may_fail: tuple[TicketServer, Peer]) -> None:
    ticket_server, peer = half_may_fail
    for number, ticket in enumerate(peer.tickets(64)):
        peer.send(Group(ticket.id, "p", (failed_episode(),)) if number % 2 else group_of(ticket))
    assert len(ticket_server.next_batch(32, timeout_s=10.0)) == 32
