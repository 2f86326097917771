"""Tickets travel in as few messages as can carry them; a sample too large for any costs its own ticket alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from envs.datasets import load_dataset
from envs.row_files import write_rows
from learner.tickets.protocol import TicketServerSettings
from learner.tickets.ticket_server import TicketServer
from shared.types import Image, Sample, Tickets
from shared.wire.endpoints import EndpointSettings
from shared.wire.frames import Limits
from tests.support.tickets.server_rig import Peer, opened
from tests.support.wires import RULES, book_settings

__all__ = ["opened"]  # a fixture


def bounded_server(tmp_path: Path, opened: list, mib: Callable[[int], float]) -> TicketServer:
    """Of samples with images of so many MiB, by position, and messages of one MiB."""

    class Heavy:
        def sample(self, position: int) -> Sample:
            return Sample(str(position), images=(Image.of(bytes([position]) * int(mib(position) * 2**20)),))

    endpoint = EndpointSettings(max_message_bytes=2**20)
    settings = TicketServerSettings("tcp://127.0.0.1:*", tmp_path, "run-1", RULES, endpoint=endpoint)
    opened.append(TicketServer(Heavy(), book_settings(), settings))
    return opened[-1]


@pytest.mark.parametrize(("mib", "messages"), [(0.3, 2), (0.7, 4)])
def test_tickets_that_are_too_large_for_one_message_together_travel_in_several(
    tmp_path: Path, opened: list, mib: float, messages: int
) -> None:
    ticket_server = bounded_server(tmp_path, opened, lambda _: mib)
    peer = Peer(ticket_server.address)
    opened.append(peer)
    peer.hello()
    ticket_server.open()
    came = [peer.expect(Tickets).tickets for _ in range(messages)]
    assert [t.sample.id for tickets in came for t in tickets] == ["0", "1", "2", "3"]


def test_a_sample_that_no_message_can_carry_is_dropped_with_its_name_and_the_next_one_is_played(
    tmp_path: Path, opened: list, caplog: pytest.LogCaptureFixture
) -> None:
    ticket_server = bounded_server(tmp_path, opened, lambda position: 2 if position == 1 else 0.01)
    peer = Peer(ticket_server.address)
    opened.append(peer)
    peer.hello()
    ticket_server.open()
    assert [ticket.sample.id for ticket in peer.tickets(4)] == ["0", "2", "3", "4"]
    assert "sample '1' cannot be sent to an actor: too_large" in caplog.text
    assert ticket_server.metrics()["tickets/dropped/unsendable"] == 1


def test_a_row_that_no_message_of_the_recipe_can_carry_is_left_out_of_a_dataset_and_counted(tmp_path: Path) -> None:
    row = {"problem": "Find x.", "answer": "7"}
    write_rows(tmp_path / "rows.jsonl", [row, {**row, "problem": "Find " + 2**16 * "x"}])
    report = load_dataset(tmp_path / "rows.jsonl", limits=Limits(message_bytes=2**15)).report
    assert (report.samples, report.bad_rows) == (1, 1)
    assert "too_large" in report.summary() and "limit 32768" in report.summary()
