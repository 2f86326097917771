"""A ticket server with real sockets and its real thread, and actors that are bare sockets controlled by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from learner.tickets.ticket_server import TicketServer
from shared.types import Hello, Receipt, Request, Ticket, Tickets
from shared.wire.codec import decode, encode
from tests.support.wires import VOCAB, start_ticket_server


class Peer:
    """An actor that is a bare DEALER: it sends given messages and collects received ones."""

    def __init__(self, address: str, name: str = "p", slots: int = 4, number: int = 1) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = f"{name}#{number}".encode()
        self.socket.connect(address)
        self.name = name
        self.slots = slots

    def hello(self, *held: str, vocab_size: int = VOCAB) -> None:
        self.send(Hello(self.name, (f"http://{self.name}",), vocab_size, held, 0.5))
        self.send(Request(self.slots))

    def send(self, message: object) -> None:
        self.socket.send_multipart(encode(message))  # type: ignore[arg-type]

    def receive(self, timeout_s: float = 5.0) -> object:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return decode(self.socket.recv_multipart())

    def expect(self, kind: type) -> Any:
        """Return the next message of this kind; skip others."""
        while (message := self.receive()) is not None:
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def tickets(self, count: int) -> list[Ticket]:
        return self._gathered(count, Tickets, lambda message: message.tickets)

    def taken(self, count: int) -> list[str]:
        """Return `count` ticket ids from the next Receipts."""
        return self._gathered(count, Receipt, lambda message: message.ticket_ids)

    def _gathered(self, count: int, kind: type, items: Callable[[Any], Sequence[Any]]) -> list[Any]:
        got: list[Any] = []
        while len(got) < count:
            got += items(self.expect(kind))
        return got

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def opened() -> Iterator[list]:
    things: list = []
    yield things
    for thing in reversed(things):
        if isinstance(thing, TicketServer):
            thing.stop("test over")
        else:
            thing.close()


@pytest.fixture
def ticket_server(tmp_path: Path, opened: list) -> TicketServer:
    opened.append(start_ticket_server(tmp_path, lost_after_s=0.3))
    return opened[-1]


@pytest.fixture
def peer(ticket_server: TicketServer, opened: list) -> Peer:
    opened.append(Peer(ticket_server.address))
    return opened[-1]
