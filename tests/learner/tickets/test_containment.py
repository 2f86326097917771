"""What an actor sends may end its own group, never the ticket server; what is refused is counted, said and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from learner.batch.episodes import check_group
from learner.batch.image_decoder import ImageDecoder
from learner.tickets.protocol import CANCELS_PER_HELLO, IDS_PER_MESSAGE
from learner.tickets.selection_bias import SelectionMeter
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import TicketBook
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.families.registry import FAMILIES
from shared.metrics import means
from shared.types import Cancel, Group, Hello, Refusal, Ticket, Turn, Welcome
from shared.util.refusals import KEPT_EVERY_S, KEPT_FILES, LOG_EVERY_S, Refusals
from shared.vision import VisionSpec
from shared.wire.codec import WireError, encode
from tests.support.hostile.images import DAMAGED
from tests.support.machine import until
from tests.support.tickets.server_rig import Peer, opened
from tests.support.tiny import draw_image, png
from tests.support.wires import (
    GROUP,
    PLACEHOLDER,
    RULES,
    STOP,
    TICKET,
    VOCAB,
    book_settings,
    changed_header,
    episode,
    with_header,
)

__all__ = ["opened"]  # a fixture

SPEC = VisionSpec(image_token_id=PLACEHOLDER, family=FAMILIES["qwen3_vl"], min_pixels=1024, max_pixels=1 << 20)
PICTURE = png(draw_image(64, 64))
Check = Callable[[Group], None]


def server_and_peer(tmp: Path, opened: list, check: Check) -> tuple[TicketServer, Peer]:
    settings = TicketServerSettings("tcp://127.0.0.1:*", tmp, "run-1", RULES, check=check)
    server = TicketServer(SeedSource(), book_settings(groups_per_version=100), settings)
    opened.append(server)
    peer = Peer(server.address, slots=8)
    opened.append(peer)
    server.open(0)
    peer.hello()
    return server, peer


@pytest.fixture
def decoding(tmp_path: Path, opened: list) -> tuple[TicketServer, Peer]:
    """An open ticket server that decodes images, of episodes of at most 100 tokens, and an actor."""
    return server_and_peer(tmp_path, opened, partial(check_group, decoder=ImageDecoder(SPEC), max_context=100))


def group_with(ticket: Ticket, **changes: object) -> Group:
    return Group(ticket.id, "p", (episode(**{"image": PICTURE} | changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", sorted(DAMAGED))
def test_a_group_with_a_damaged_image_is_refused_and_the_next_is_taken(
    decoding: tuple[TicketServer, Peer], damage: str
) -> None:
    server, peer = decoding
    bad, good = peer.tickets(8)[:2]
    peer.send(group_with(bad, image=DAMAGED[damage]))
    assert peer.expect(Refusal).ticket_id == bad.id  # its actor forgets it
    peer.send(group_with(good))
    assert peer.taken(1) == [good.id]
    assert server.metrics()["wire/rejected/unusable"] == 1


@pytest.mark.parametrize(
    "error", [KeyError("x"), RecursionError(), MemoryError(), SyntaxError("broken"), OSError(5, "x")]
)
def test_whatever_a_group_does_to_its_reader_it_is_refused(tmp_path: Path, opened: list, error: Exception) -> None:
    def check(group: Group) -> None:
        if group.trajectories[0].reward == 2.0:
            raise error

    server, peer = server_and_peer(tmp_path, opened, check)
    bad, good = peer.tickets(8)[:2]
    peer.send(group_with(bad, reward=2.0))
    assert peer.expect(Refusal).ticket_id == bad.id
    peer.send(group_with(good))
    assert peer.taken(1) == [good.id]
    assert server.metrics()["wire/rejected/unreadable"] == 1


def test_a_message_that_cannot_be_answered_is_counted_and_the_server_goes_on(
    decoding: tuple[TicketServer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, peer = decoding
    monkeypatch.setattr(TicketBook, "reconcile_held", lambda *_: 1 / 0)
    peer.hello("1-a")
    until(lambda: server.metrics().get("wire/rejected/unanswerable", 0) > 0)
    monkeypatch.undo()
    peer.hello("1-a")
    assert peer.expect(Cancel).ticket_ids == ("1-a",)


def test_a_header_of_nested_lists_costs_one_refusal(decoding: tuple[TicketServer, Peer]) -> None:
    server, peer = decoding
    nested = b"\x91" * 5000 + b"\xc0"
    header = msgspec.msgpack.encode({**STOP, "v": msgspec.Raw(nested)})
    peer.socket.send_multipart([header])
    peer.socket.send_multipart(with_header({**STOP, "message": msgspec.Raw(nested)}))
    until(lambda: server.metrics()["wire/rejected"] == 2)
    peer.hello()
    peer.expect(Welcome)


LONG_ID = "0-" + "a" * 255


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (GROUP, ["ticket_id"]),
        (GROUP, ["actor"]),
        (Hello("a", ("http://x:1",), VOCAB, ("0-a",), 0.25), ["held", 0]),
        (Hello("a", ("http://x:1",), VOCAB, ("0-a",), 0.25), ["actor"]),
    ],
)
def test_an_id_that_is_sent_back_is_short(message: object, path: list, decoding: tuple[TicketServer, Peer]) -> None:
    server, peer = decoding
    peer.socket.send_multipart(changed_header(message, path, LONG_ID))
    until(lambda: server.metrics().get("wire/rejected/too_large") == 1)
    peer.hello()
    peer.expect(Welcome)


@pytest.mark.slow
def test_an_actor_that_names_very_many_tickets_is_answered_in_parts(decoding: tuple[TicketServer, Peer]) -> None:
    _, peer = decoding
    held = tuple(f"{number}-{'x' * 240}" for number in range(2**16))
    while held:
        peer.send(Hello("p", ("http://p",), VOCAB, held, 0.5))
        void: list[str] = []
        while len(void) < min(len(held), CANCELS_PER_HELLO * IDS_PER_MESSAGE):
            void += peer.expect(Cancel).ticket_ids
        assert tuple(void) == held[: len(void)]
        held = held[len(void) :]


# ------------------------------------------------------------------ numbers and sizes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": png(draw_image(1024, 1024))}, "an episode of 1030 tokens"),  # 32 * 32 visual ones for one
        ({"reward": 1e200}, "earned 1e"),
        ({"turns": (Turn(2, 4, -1e200), Turn(6, 7, 0.0))}, "earned 1e"),
    ],
)
def test_what_no_step_can_train_on_is_refused(decoding: tuple[TicketServer, Peer], changes: dict, words: str) -> None:
    _, peer = decoding
    ticket = peer.tickets(8)[0]
    peer.send(group_with(ticket, **changes))
    assert words in peer.expect(Refusal).reason


def test_an_image_of_an_episode_that_is_too_long_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ImageDecoder(SPEC)
    monkeypatch.setattr(decoder, "get", lambda _: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"model.max_context is 100"):
        check_group(group_with(TICKET, image=png(draw_image(1024, 1024))), decoder, 100)


def test_huge_finite_numbers_do_not_stop_what_summarises_them() -> None:
    meter, huge = SelectionMeter(), episode(reward=1e200)
    for _ in range(3):
        meter.add("finished", TICKET, Group("0-a", "a", (huge, episode(reward=-1e308)), played_s=1e308))
        meter.add("trained", TICKET, Group("0-a", "a", (huge,), played_s=1e308))
    assert meter.metrics() and meter.table()
    assert means([{"x": 1e308}, {"x": 1e308}]) == {"x": np.inf}
    assert means([{"x": -1e308}, {"x": -1e308}, {"x": 1.0}]) == {"x": -np.inf}


# ------------------------------------------------------------------ what is said and kept


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Iterator[tuple[logging.Logger, list[str]]]:
    logger, said = logging.Logger("refusals"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield logger, said


def test_a_refusal_is_one_line_a_minute_for_each_reason_with_the_kept_file(
    tmp_path: Path, lines: tuple[logging.Logger, list[str]]
) -> None:
    logger, said = lines
    clock = Clock()
    refusals = Refusals("a message", logger, tmp_path, clock)
    for number in range(100):
        refusals.add(f"peer#{number}", "header", "no header", [b"x"])
        refusals.add("other", "digest", "damaged", [b"y"])
    assert len(said) == 2
    assert "rejected a message of peer#0: header: no header" in said[0]
    named = Path(said[0].partition("kept as ")[2].rstrip(")"))
    assert msgspec.msgpack.decode((tmp_path / "00000000-peer_0-header.msgpack").read_bytes())["frames"] == [b"x"]
    assert named == tmp_path / "00000000-peer_0-header.msgpack"
    clock.now = LOG_EVERY_S
    refusals.add("late", "header", "no header", [b"x"])
    assert len(said) == 3 and "101 for this reason" in said[2]
    assert refusals.counts == {"header": 101, "digest": 100}


def test_after_a_restart_new_refusals_are_kept_and_old_ones_go(
    tmp_path: Path, lines: tuple[logging.Logger, list[str]]
) -> None:
    clock = Clock()
    for process in ("first", "second"):
        refusals = Refusals("a message", lines[0], tmp_path, clock)
        for _ in range(3 * KEPT_FILES):
            refusals.add(process, "header", "no header", [b"x"])
    assert sorted({path.name.split("-")[1] for path in tmp_path.iterdir()}) == ["second"]
    assert len(list(tmp_path.iterdir())) == KEPT_FILES


def test_a_flood_writes_few_files(tmp_path: Path, lines: tuple[logging.Logger, list[str]]) -> None:
    clock = Clock()
    refusals = Refusals("a message", lines[0], tmp_path, clock)
    for _ in range(10):
        refusals.add("p", "header", "no header", [b"x"] * 1000)
    for _ in range(1000):
        refusals.add("p", "header", "no header", [b"x"] * 1000)
    assert max(int(path.name[:8]) for path in tmp_path.iterdir()) == KEPT_FILES - 1
    clock.now = KEPT_EVERY_S
    refusals.add("p", "header", "no header", [b"x"])
    assert max(int(path.name[:8]) for path in tmp_path.iterdir()) == KEPT_FILES


def test_a_disk_that_refuses_costs_the_file_alone(tmp_path: Path, lines: tuple[logging.Logger, list[str]]) -> None:
    (tmp_path / "rejected").write_text("in the way")
    refusals = Refusals("a message", lines[0], tmp_path / "rejected")
    refusals.add("p", "header", "no header", [b"x"])
    assert refusals.counts == {"header": 1}
    assert any("rejected a message of p" in line for line in lines[1])


def test_a_runs_folder_that_was_moved_away_does_not_come_back_for_a_refusal(
    tmp_path: Path, lines: tuple[logging.Logger, list[str]]
) -> None:
    refusals = Refusals("a message", lines[0], tmp_path / "run/rejected")
    refusals.add("p", "header", "no header", [b"x"])
    assert refusals.counts == {"header": 1} and not (tmp_path / "run").exists()


def test_the_sender_refuses_an_id_that_is_too_long_too() -> None:
    with pytest.raises(WireError, match="too_large"):
        encode(replace(GROUP, ticket_id=LONG_ID))
