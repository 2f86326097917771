"""A ticket book with a clock that the test controls."""

from __future__ import annotations

from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import TicketBook
from shared.types import Ticket
from tests.support.wires import book_settings


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_book(clock: Clock | None = None, nonce: str = "n", **changes: object) -> TicketBook:
    return TicketBook(SeedSource(), book_settings(**changes), nonce=nonce, clock=clock or Clock())


def issue_all(book: TicketBook, actor: str = "a") -> list[Ticket]:
    tickets = []
    while (ticket := book.issue(actor)) is not None:
        tickets.append(ticket)
    return tickets


def adds_up(book: TicketBook) -> bool:
    return book.issued == book.trained + book.dropped.total() + book.open
