"""The learner's book and protocol, and actors of which some are sick, in simulated time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from learner.tickets.protocol import TicketProtocol, TicketServerSettings
from learner.tickets.ticket_book import TicketBook
from shared.types import Ending, Group, Hello, Request, Ticket, Trajectory
from tests.support.schedules import Actor, Wire
from tests.support.tickets.book_rig import Clock, adds_up, make_book
from tests.support.wires import RULES, VOCAB, episode, failed_episode

MISSING = "FileNotFoundError: /data/levels.bin is not on this host"
BEAT_S = 2.0
SILENT_S = 10.0


class Cluster:
    """Actors that play as they do in `actor.actor_loop`, and the learner, which trains as soon as it can. An actor
    whose name is in `endings` fails all its episodes so; `seconds`, 0 by default, is how long its episodes take."""

    def __init__(
        self, folder: Path, names: tuple[str, ...] = (), *, max_share: float = 0.5, tick_s: float = 0.2, **shape: object
    ) -> None:
        self.clock = Clock()
        self.wire = Wire()
        self.tick_s = tick_s
        self.settings = TicketServerSettings("", folder, "run", RULES, SILENT_S, max_failure_share=max_share)
        self.shape = {"groups_per_version": 16, "max_staleness": 1} | shape
        self.processes = 0
        self.start_learner()
        self.actors: dict[str, Actor] = {}
        self.slots: dict[str, int] = {}
        self.endings: dict[str, Ending] = {}
        self.seconds: dict[str, float] = {}
        self.began: dict[tuple[str, str], float] = {}  # (actor's key, ticket) -> when it began to play
        self.trained: list[str] = []  # ids of samples
        self.issued: dict[str, int] = {}  # key -> tickets that it got
        self.next_beat = 0.0
        for name in names:
            self.arrive(name)

    def start_learner(self) -> None:
        self.processes += 1
        self.book: TicketBook = make_book(self.clock, nonce=f"p{self.processes}", **self.shape)
        self.protocol = TicketProtocol(self.wire, self.book, self.settings, self.clock)  # type: ignore[arg-type]
        self.protocol.issuing = True

    def resume(self) -> None:
        """Go on as another learner process, from a checkpoint of this moment."""
        state = json.loads(json.dumps(self.book.state_dict()))
        self.wire.to_actors.clear()
        self.start_learner()
        self.book.load_state(state)
        self.beat()

    # ------------------------------------------------------------------ actors

    def arrive(self, name: str, slots: int = 4, key: str = "") -> None:
        actor = self.actors[name] = Actor(key or f"{name}#{len(self.issued)}")
        self.slots[name] = slots
        self.issued[actor.key] = 0
        self.wire.present.add(actor.key)
        self.greet(name, actor)

    def leave(self, name: str) -> Actor:
        actor = self.actors.pop(name)
        self.wire.present.discard(actor.key)
        self.protocol.forget(actor.key.encode(), "its connection is closed")
        return actor

    def restart(self, name: str, *, remembers: bool) -> None:
        """Begin another process of the same actor; one that `remembers` has the journal of the tickets."""
        old = self.leave(name)
        self.arrive(name, self.slots[name])
        if remembers:
            new = self.actors[name]
            new.playing = old.playing
            for ticket_id in new.playing:
                self.began[new.key, ticket_id] = self.clock.now
            self.greet(name, new)

    def say(self, actor: Actor, message: Any) -> None:
        self.protocol.answer(actor.key.encode(), message, ())

    def greet(self, name: str, actor: Actor) -> None:
        self.say(actor, Hello(name, ("http://e",), VOCAB, actor.held()))
        self.say(actor, Request(self.slots[name]))

    def beat(self) -> None:
        for name, actor in self.actors.items():
            self.greet(name, actor)
            for group in list(actor.finished.values()):
                self.say(actor, group)
        self.deliver()

    def play(self, ticket: Ticket, name: str) -> Group:
        ending = self.endings.get(name)
        made: Trajectory = failed_episode(ending, MISSING) if ending else episode(self.book.version)
        return Group(ticket.id, name, (made,) * ticket.group_size)

    # ------------------------------------------------------------------ time

    def run(self, seconds: float) -> None:
        """Let time pass, until the run is over. Raise TooManyFailures when the learner does."""
        end = self.clock.now + seconds
        while self.clock.now < end and self.book.trained < (self.book.settings.total_groups or 10**9):
            self.step()

    def step(self) -> None:
        self.clock.now += self.tick_s
        if self.clock.now >= self.next_beat:
            self.next_beat = self.clock.now + BEAT_S
            self.beat()
        self.protocol.tick(drained=True)
        self.deliver()
        for name, actor in list(self.actors.items()):
            for ticket_id, (ticket, _) in list(actor.playing.items()):
                if self.clock.now - self.began[actor.key, ticket_id] >= self.seconds.get(name, 0.0):
                    del actor.playing[ticket_id]
                    group = actor.finished[ticket_id] = self.play(ticket, name)
                    self.say(actor, group)
        self.protocol.tick(drained=True)
        self.deliver()
        self.protocol.check_failures()
        batch = self.book.take_groups(self.book.settings.groups_per_version)
        if batch:
            self.trained += [ticket.sample.id for ticket, _ in batch]
            self.book.commit()
            self.book.version += 1
        assert adds_up(self.book)

    def deliver(self) -> None:
        while self.wire.to_actors:
            key, message = self.wire.to_actors.pop(0)
            for actor in self.actors.values():
                if actor.key == key:
                    before = set(actor.playing)
                    actor.hear(message)
                    for ticket_id in set(actor.playing) - before:
                        self.began[key, ticket_id] = self.clock.now
                        self.issued[key] += 1

    def tickets_of(self, name: str) -> int:
        return sum(count for key, count in self.issued.items() if key.startswith(f"{name}#"))
