"""An actor process: tickets in, groups of episodes out.

    learner ──Tickets──▶ HeldTickets ──(ticket, index)──▶ play ──▶ env and engine
       ▲                  │       ▲                        │
       └── Group until Ack┘       └────── Trajectory ◀─────┘

The learner gives at most `groups` tickets at a time, and counts one as held until it has taken the group; so an actor
whose learner is slow or away stops by itself once it holds that many.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from actor.contract import broken, failed, sendable
from actor.idle_meter import IdleMeter
from actor.journal import Journal
from actor.named_engines import NamedEngines
from shared.codec import Message, TokenRules, WireError
from shared.guards.refusals import Refusals
from shared.log import get_logger
from shared.transport import Dealer, Secure, SocketSettings
from shared.types import (
    Ack,
    Bye,
    Cancel,
    Group,
    Hello,
    Receipt,
    Refusal,
    Request,
    Stop,
    Ticket,
    Tickets,
    Trajectory,
    Welcome,
)

Play = Callable[[Ticket, int], Awaitable[Trajectory]]
"""Plays one episode of a ticket, given its index in the group. A failure in it is its ending, not an exception."""

RECONNECT_S = 0.1
FAILED = "failed"  # of an actor's end: it raised
EXIT_NO_LEARNER = 3  # of the process: the learner is silent, has failed, or wants no such actor


@dataclass(frozen=True, slots=True)
class ActorSettings:
    name: str
    learner: str  # address
    engine_urls: tuple[str, ...]  # its own; empty = it plays on those that the learner names
    rules: TokenRules
    groups: int = 16  # played at once; 0 = it only names its engines
    connect_timeout_s: float = 60.0  # the actor gives up when no learner has answered for so long
    reconnect_timeout_s: float = 600.0  # the same for a learner that has answered before
    heartbeat_s: float = 2.0
    sockets: SocketSettings = field(default_factory=SocketSettings)
    secure: Secure | None = None


class End(NamedTuple):
    """Why an actor ends, and its process's exit code: 0, or 1 after a failure."""

    code: int
    reason: str


async def run_actor(
    settings: ActorSettings, play: Play, journal: Journal | None = None, named: NamedEngines | None = None
) -> int:
    """Plays what the learner asks for until it says Stop, first what the `journal` found open; `named` follows the
    engines that the learner names. Returns the process's exit code: 0, or 1 with one log line.

    Waits for the learner's messages and for the next heartbeat; never longer than `connect_timeout_s` for a first
    answer, and `reconnect_timeout_s` for a learner that has gone silent. An exception of `play` ends the actor and is
    raised. ValueError: the address cannot be used.
    """
    dealer = Dealer(settings.learner, settings.name, settings.sockets, settings.secure)
    farewell = FAILED
    try:
        async with asyncio.TaskGroup() as tasks:
            held_tickets = HeldTickets(settings, play, dealer, tasks, journal)
            end = await Conversation(settings, dealer, held_tickets, named).run()
            farewell = end.reason
            get_logger(settings.name).log(logging.ERROR if end.code else logging.INFO, "%s", farewell)
            held_tickets.drop(held_tickets.held(), farewell)
        return end.code
    except asyncio.CancelledError:
        farewell = "asked to stop"
        raise
    finally:
        if journal is None or farewell != FAILED:  # else the next process comes back for its tickets
            await dealer.send(Bye(farewell))
            if journal:
                journal.close()
        dealer.close(linger_s=0.5)


class Conversation:
    """What an actor and the learner tell each other: heartbeats on time, and what each message of the learner does."""

    def __init__(
        self, settings: ActorSettings, dealer: Dealer, held_tickets: HeldTickets, named: NamedEngines | None = None
    ) -> None:
        self._settings, self._dealer, self._held_tickets, self._named = settings, dealer, held_tickets, named
        self._process_id: str | None = None  # of the learner process that has welcomed this actor
        self._misfits = 0  # messages of another schema
        self._log = get_logger(settings.name)
        self._refusals = Refusals("a message", self._log)

    async def run(self) -> End:
        heard, next_beat = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                connected = await self._held_tickets.beat(engines=not self._named or bool(self._named.clients))
                next_beat = now + (self._settings.heartbeat_s if connected else RECONNECT_S)
            try:
                message = await self._dealer.receive(next_beat - now)
            except WireError as error:
                end = self._malformed(error)
            else:
                now = time.monotonic()
                end = self._silent(now - heard) if message is None else await self._contained(message)
                heard = heard if message is None else now
            if end is not None:
                return end

    async def _contained(self, message: Message) -> End | None:
        """As `handle`; a message that cannot be handled is refused, and the others count."""
        try:
            return await self.handle(message)
        except Exception as error:  # noqa: BLE001 - it is this message's
            return self._malformed(WireError("unanswerable", f"{type(error).__name__}: {error}"))

    async def handle(self, message: Message) -> End | None:
        """Does what the learner says; the actor's end if that is what it says."""
        tickets, log = self._held_tickets, self._log
        match message:
            case Tickets(issued):
                for ticket in issued:
                    tickets.take(ticket)
            case Receipt(ticket_ids):
                tickets.keep(ticket_ids)
            case Refusal(ticket_id, reason):
                tickets.forget((ticket_id,))
                log.warning("the learner refused the group of ticket %s: %s", ticket_id, reason)
            case Ack(ticket_ids):
                tickets.forget(ticket_ids)
            case Cancel(ticket_ids, reason):
                tickets.drop(ticket_ids, reason)
            case Welcome(run_id, version, process_id, engines):
                if process_id != self._process_id:
                    log.info("learner %s is here: run %s, version %d", self._settings.learner, run_id, version)
                    await tickets.send_all()
                self._process_id = process_id
                if self._named and (reason := self._named.follow(engines)):
                    return End(1, reason)
            case Stop(reason, failed):
                return End(1 if failed or self._process_id is None else 0, f"the learner says stop: {reason}")
        return None

    def _malformed(self, error: WireError) -> End | None:
        """A single message of another schema may have been damaged on its way; two are those of another Pronk."""
        self._misfits += error.reason == "schema_version"
        if self._misfits > 1 and self._process_id is None:
            return End(1, f"learner {self._settings.learner}: {error.detail}")
        self._refusals.add("the learner", error.reason, error.detail)
        return None

    def _silent(self, for_s: float) -> End | None:
        """Nothing has come for so long."""
        s, known = self._settings, self._process_id is not None
        if for_s <= (s.reconnect_timeout_s if known else s.connect_timeout_s):
            return None
        cure = "it seems to have died" if known else "start it, or check --actor.learner"
        return End(1, f"learner {s.learner} is silent for {for_s:.0f} s; {self._dealer.trouble() or cure}")


@dataclass(slots=True)
class Finished:
    """A group that was played and is not acknowledged yet."""

    group: Group
    sent_at: float = -math.inf
    taken: bool = False  # by the learner, which has not trained on it yet


class HeldTickets:
    """The tickets an actor holds: being played, finished, or taken by a learner that has not trained on it yet.

    Groups that the learner has taken are kept for the case that it dies before its next checkpoint. The number of
    tickets that it issues bounds what is held.
    """

    def __init__(
        self,
        settings: ActorSettings,
        play: Play,
        dealer: Dealer,
        tasks: asyncio.TaskGroup,
        journal: Journal | None = None,
    ) -> None:
        self._settings, self._play, self._dealer, self._tasks = settings, play, dealer, tasks
        self._journal = journal
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._finished: dict[str, Finished] = {}
        self._places = asyncio.Semaphore(settings.groups)
        self._idle = IdleMeter()
        self._log = get_logger(settings.name)
        for ticket in journal.tickets() if journal else ():
            self.take(ticket)

    def held(self) -> tuple[str, ...]:
        return (*self._playing, *self._finished)

    def take(self, ticket: Ticket) -> None:
        if ticket.id not in self.held():
            if self._journal:
                self._journal.begin(ticket)
            self._playing[ticket.id] = self._tasks.create_task(self._play_group(ticket))

    def keep(self, ticket_ids: tuple[str, ...]) -> None:
        """The learner has these groups: they are not sent again, unless to another learner process."""
        for ticket_id in ticket_ids:
            if ticket_id in self._finished:
                self._finished[ticket_id].taken = True
        if self._journal:
            self._journal.end(ticket_ids)

    async def send_all(self) -> None:
        """To a learner process that has none of the groups that an earlier one took."""
        for finished in list(self._finished.values()):
            finished.taken = False
            await self._send(finished)

    def forget(self, ticket_ids: tuple[str, ...]) -> None:
        for ticket_id in ticket_ids:
            self._finished.pop(ticket_id, None)
        if self._journal:
            self._journal.end(ticket_ids)

    def drop(self, ticket_ids: tuple[str, ...], reason: str) -> None:
        """Stops playing these tickets, and discards what was finished of them."""
        for ticket_id in ticket_ids:
            task = self._playing.pop(ticket_id, None)
            if task is not None:
                task.cancel(reason)
        self.forget(ticket_ids)

    async def beat(self, *, engines: bool) -> bool:
        """Says what is held, asks for more if there are engines, resends what has no answer; False = not connected."""
        s = self._settings
        hello = Hello(s.name, s.engine_urls, s.rules.vocab_size, self.held(), self._idle.read())
        connected = await self._dealer.send(hello) and await self._dealer.send(Request(s.groups if engines else 0))
        late = time.monotonic() - 2 * s.heartbeat_s
        for finished in list(self._finished.values()) if connected else ():
            if not finished.taken and finished.sent_at <= late:
                await self._send(finished)
        return connected

    async def _play_group(self, ticket: Ticket) -> None:
        async with self._places:
            started = time.monotonic()
            with self._idle:
                async with asyncio.TaskGroup() as episodes:
                    played = [episodes.create_task(self._play_one(ticket, i)) for i in range(ticket.group_size)]
        group = Group(ticket.id, self._settings.name, tuple(p.result() for p in played), time.monotonic() - started)
        finished = self._finished[ticket.id] = Finished(group)
        del self._playing[ticket.id]
        await self._send(finished)

    async def _play_one(self, ticket: Ticket, index: int) -> Trajectory:
        trajectory = await self._play(ticket, index)
        if wrong := broken(trajectory, self._settings.rules):
            self._log.warning("an episode of ticket %s breaks the contract: %s", ticket.id, wrong)
            return failed(wrong)
        return trajectory

    async def _send(self, finished: Finished) -> None:
        """Sends a group, with failed episodes in place of those that cannot be sent."""
        try:
            sent = await self._dealer.send(finished.group)
        except WireError as error:
            self._log.error("the group of ticket %s cannot be sent: %s", finished.group.ticket_id, error)
            finished.group = sendable(finished.group, error, self._settings.sockets.max_message_bytes)
            sent = await self._dealer.send(finished.group)
        if sent:
            finished.sent_at = time.monotonic()
