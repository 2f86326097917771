"""Actors and a socket for tests that decide which messages arrive: nothing here runs by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.types import Ack, Cancel, Group, Receipt, Refusal, Ticket, Tickets, Welcome
from shared.wire.endpoints import Delivery

Stamp = tuple[int, int]  # (learner process, version) of an engine's weights


def is_part_of_history(stamp: Stamp, process: int, last: int, forks: Mapping[int, Stamp]) -> bool:
    """Tell whether these weights belong to the history of a learner that is now `process` at version `last`. `forks`:
    for each process, the process that it resumed from, and the last version of that one in its history."""
    while stamp[0] != process:
        if process == 0:
            return False
        process, fork = forks[process]
        last = min(last, fork)
    return stamp[1] <= last


@dataclass
class Actor:
    """An actor that keeps tickets and groups as `actor.actor_loop` does."""

    key: str
    weights: Stamp = (0, 0)  # present weights of its engine
    process_id: str = ""
    playing: dict[str, tuple[Ticket, Stamp]] = field(default_factory=dict)  # with the weights at the ticket's start
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
    """Replaces the learner's socket: sent messages wait here until the test delivers, repeats or loses them."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.to_actors: list[tuple[str, Any]] = []
        self.to_learner: list[tuple[str, Any]] = []

    def send(self, peer: bytes, message: Any) -> Delivery:
        if peer.decode() not in self.present:
            return Delivery.GONE
        self.to_actors.append((peer.decode(), message))
        return Delivery.SENT
