"""Actors and a socket for tests that decide what arrives: nothing here runs by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.transport import Sent
from shared.types import Ack, Cancel, Group, Receipt, Refusal, Ticket, Tickets, Welcome

Stamp = tuple[int, int]  # learner process, version: what an engine's weights are


def is_part_of_history(stamp: Stamp, process: int, last: int, forks: Mapping[int, Stamp]) -> bool:
    """Whether these weights are among those that a learner, now `process` at version `last`, goes on from. `forks`: of
    each process the one that it went on from, and the last version of that which it has."""
    while stamp[0] != process:
        if process == 0:
            return False
        process, fork = forks[process]
        last = min(last, fork)
    return stamp[1] <= last


@dataclass
class Actor:
    """Keeps groups as `actor.loop` does."""

    key: str
    weights: Stamp = (0, 0)  # of its engine, now
    process_id: str = ""
    playing: dict[str, tuple[Ticket, Stamp]] = field(default_factory=dict)  # and the weights at its start
    finished: dict[str, Group] = field(default_factory=dict)
    kept: dict[str, Group] = field(default_factory=dict)

    def held(self) -> tuple[str, ...]:
        return (*self.playing, *self.finished, *self.kept)

    def hear(self, message: Any) -> None:
        match message:
            case Tickets(tickets):
                self.playing |= {t.id: (t, self.weights) for t in tickets if t.id not in self.held()}
            case Receipt(ticket_ids):
                self.kept |= {t: self.finished.pop(t) for t in ticket_ids if t in self.finished}
            case Refusal(ticket_id):
                self.forget((ticket_id,))
            case Ack(ticket_ids):
                self.forget(ticket_ids)
            case Cancel(ticket_ids):
                self.forget(ticket_ids)
                for ticket_id in ticket_ids:
                    self.playing.pop(ticket_id, None)
            case Welcome(_, _, process_id):
                if process_id != self.process_id:
                    self.process_id = process_id
                    self.finished |= self.kept
                    self.kept.clear()

    def forget(self, ticket_ids: tuple[str, ...]) -> None:
        for ticket_id in ticket_ids:
            self.finished.pop(ticket_id, None)
            self.kept.pop(ticket_id, None)


class Wire:
    """Stands in for the learner's socket: what is sent lies here until the schedule delivers, repeats or loses it."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.to_actors: list[tuple[str, Any]] = []
        self.to_learner: list[tuple[str, Any]] = []

    def send(self, peer: bytes, message: Any) -> Sent:
        if peer.decode() not in self.present:
            return Sent.GONE
        self.to_actors.append((peer.decode(), message))
        return Sent.YES
