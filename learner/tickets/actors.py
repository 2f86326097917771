"""The actor processes that the learner knows, and whom it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.tickets.book import TicketBook

NAMED_ACTORS = 8


@dataclass(slots=True)
class Actor:
    """What the learner knows of one actor process; `key` is `NAME#RANDOM`."""

    key: str
    engine_urls: tuple[str, ...]
    idle_frac: float
    last_seen: float
    slots: int = 0  # groups that it plays at once


def wait_in_words(
    book: TicketBook, actors: Sequence[Actor], rejected: Mapping[str, int], *, issuing: bool, now: float, address: str
) -> str:
    """One line: what has arrived, what is missing, and which actors hold it."""
    parts = [f"{book.ready} groups ready, {book.open + book.evaluations.open} tickets open, version {book.version}"]
    if not issuing:
        parts.append("tickets are not issued yet: no engine has weights")
    if not actors:
        parts.append(f"no actor is here; start launch/actors.py --actor.learner {address}")
    elif not any(actor.engine_urls for actor in actors):
        parts.append("no actor here has engines; start launch/actors.py with engine.count on the engines' hosts")
    for actor in actors[:NAMED_ACTORS]:
        count, oldest = book.holding(actor.key), book.oldest_held_s(actor.key)
        seen = now - actor.last_seen
        parts.append(f"{actor.key} holds {count} tickets, the oldest for {oldest:.0f} s, seen {seen:.0f} s ago")
    if len(actors) > NAMED_ACTORS:
        parts.append(f"and {len(actors) - NAMED_ACTORS} more actors")
    if book.dropped:
        parts.append(f"dropped {dict(book.dropped)}, last {book.last_drop!r}")
    if book.refused:
        parts.append(f"refused {dict(book.refused)}")
    if rejected:
        parts.append(f"rejected messages {dict(rejected)}")
    return "; ".join(parts)
