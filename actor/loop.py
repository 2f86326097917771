"""An actor process: tickets in, groups of episodes out.

    learner ──Tickets──▶ desk ──(ticket, index)──▶ play ──▶ env and engine
       ▲                  │ ▲                        │
       └── Group until Ack┘ └──────── Trajectory ◀───┘

The learner gives at most `groups` tickets at a time, and counts one as held until it has taken the group; so an actor
whose learner is slow or away stops by itself once it holds that many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from shared.codec import TokenRules, WireError, check_trajectory
from shared.log import get_logger
from shared.transport import Dealer, Secure, SocketSettings
from shared.types import (
    Ack,
    Bye,
    Cancel,
    Ending,
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
"""Plays one episode of a ticket, given its index in the group. What goes wrong in it is an ending, not an exception."""

RECONNECT_S = 0.1
EXIT_USER_ERROR = 2  # of the process
EXIT_NO_LEARNER = 3  # the learner is silent, has failed, or wants no such actor


@dataclass(frozen=True, slots=True)
class ActorSettings:
    name: str
    learner: str  # address
    engine_urls: tuple[str, ...]
    rules: TokenRules
    groups: int = 16  # played at once
    connect_timeout_s: float = 60.0  # the actor gives up when no learner has answered for so long
    reconnect_timeout_s: float = 600.0  # the same for a learner that has answered before
    heartbeat_s: float = 2.0
    sockets: SocketSettings = field(default_factory=SocketSettings)
    secure: Secure | None = None


async def run_actor(settings: ActorSettings, play: Play) -> int:
    """Plays what the learner asks for until it says Stop. Returns the process's exit code: 0, or 1 with one log line.

    Waits for the learner's messages and for the next heartbeat; never longer than `connect_timeout_s` for a first
    answer, and `reconnect_timeout_s` for a learner that has gone silent. An exception of `play` ends the actor and is
    raised. ValueError: the address cannot be used.
    """
    log = get_logger(settings.name)
    dealer = Dealer(settings.learner, settings.name, settings.sockets, settings.secure)
    farewell = "failed"
    try:
        async with asyncio.TaskGroup() as tasks:
            held_tickets = HeldTickets(settings, play, dealer, tasks)
            code, farewell = await _converse(settings, dealer, held_tickets)
            (log.error if code else log.info)("%s", farewell)
            held_tickets.drop(held_tickets.held(), farewell)
        return code
    except asyncio.CancelledError:
        farewell = "asked to stop"
        raise
    finally:
        await dealer.send(Bye(farewell))
        dealer.close(linger_s=0.5)


async def _converse(settings: ActorSettings, dealer: Dealer, held_tickets: HeldTickets) -> tuple[int, str]:
    """The conversation with the learner; returns the exit code and why it ended."""
    log = get_logger(settings.name)
    heard, next_beat, known, misfits = time.monotonic(), 0.0, "", 0
    while True:
        now = time.monotonic()
        if now >= next_beat:
            connected = await held_tickets.beat()
            next_beat = now + (settings.heartbeat_s if connected else RECONNECT_S)
        try:
            message = await dealer.receive(next_beat - now)
        except WireError as error:
            misfits += error.reason == "schema_version"
            if misfits > 1 and not known:  # one alone may have been damaged on its way
                return 1, f"learner {settings.learner}: {error.detail}"
            log.warning("the learner sent a malformed message: %s", error)
            continue
        now = time.monotonic()
        if message is None:
            if now - heard > (settings.reconnect_timeout_s if known else settings.connect_timeout_s):
                cure = "start it, or check --actor.learner" if not known else "it seems to have died"
                cure = dealer.trouble() or cure
                return 1, f"learner {settings.learner} is silent for {now - heard:.0f} s; {cure}"
            continue
        heard = now
        match message:
            case Tickets(tickets):
                for ticket in tickets:
                    held_tickets.take(ticket)
            case Receipt(ticket_ids):
                held_tickets.keep(ticket_ids)
            case Refusal(ticket_id, reason):
                held_tickets.forget((ticket_id,))
                log.warning("the learner refused the group of ticket %s: %s", ticket_id, reason)
            case Ack(ticket_ids):
                held_tickets.forget(ticket_ids)
            case Cancel(ticket_ids, reason):
                held_tickets.drop(ticket_ids, reason)
            case Welcome(run_id, version, process_id):
                if known != process_id:
                    log.info("learner %s is here: run %s, version %d", settings.learner, run_id, version)
                    await held_tickets.send_kept()
                known = process_id
            case Stop(reason, failed):
                return (1 if failed or not known else 0), f"the learner says stop: {reason}"


class HeldTickets:
    """The tickets an actor holds: being played, finished, or taken by a learner that has not trained on it yet.

    What the learner has taken is kept for the case that it dies before its next checkpoint. Tickets that it has issued
    bound all that.
    """

    def __init__(self, settings: ActorSettings, play: Play, dealer: Dealer, tasks: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._play = play
        self._dealer = dealer
        self._tasks = tasks
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._finished: dict[str, Group] = {}
        self._kept: dict[str, Group] = {}
        self._sent: dict[str, float] = {}  # when a finished group was sent last
        self._places = asyncio.Semaphore(settings.groups)
        self._idle = _IdleMeter()
        self._log = get_logger(settings.name)

    def held(self) -> tuple[str, ...]:
        return (*self._playing, *self._finished, *self._kept)

    def take(self, ticket: Ticket) -> None:
        if ticket.id not in self.held():
            self._playing[ticket.id] = self._tasks.create_task(self._play_group(ticket))

    def keep(self, ticket_ids: Iterable[str]) -> None:
        """The learner has these groups: they are not sent again, unless to another learner process."""
        for ticket_id in ticket_ids:
            if ticket_id in self._finished:
                self._kept[ticket_id] = self._finished.pop(ticket_id)
                self._sent.pop(ticket_id, None)

    async def send_kept(self) -> None:
        """This learner process has none of the groups that an earlier one took."""
        self._finished |= self._kept
        self._kept.clear()
        for ticket_id in list(self._finished):
            await self._send(ticket_id)

    def forget(self, ticket_ids: Iterable[str]) -> None:
        for ticket_id in ticket_ids:
            self._finished.pop(ticket_id, None)
            self._kept.pop(ticket_id, None)
            self._sent.pop(ticket_id, None)

    def drop(self, ticket_ids: tuple[str, ...], reason: str) -> None:
        """Stops playing these tickets, and discards what was finished of them."""
        for ticket_id in ticket_ids:
            task = self._playing.pop(ticket_id, None)
            if task is not None:
                task.cancel(reason)
        self.forget(ticket_ids)

    async def beat(self) -> bool:
        """Tells the learner what is held, and sends again what stayed without an answer; False = not connected."""
        s = self._settings
        hello = Hello(s.name, s.engine_urls, s.rules.vocab_size, self.held(), self._idle.read())
        connected = await self._dealer.send(hello) and await self._dealer.send(Request(s.groups))
        late = time.monotonic() - 2 * s.heartbeat_s
        for ticket_id in list(self._finished) if connected else ():
            if self._sent.get(ticket_id, late) <= late:
                await self._send(ticket_id)
        return connected

    async def _play_group(self, ticket: Ticket) -> None:
        async with self._places:
            started = time.monotonic()
            with self._idle:
                async with asyncio.TaskGroup() as episodes:
                    played = [episodes.create_task(self._play_one(ticket, i)) for i in range(ticket.group_size)]
        trajectories = tuple(task.result() for task in played)
        self._finished[ticket.id] = Group(ticket.id, self._settings.name, trajectories, time.monotonic() - started)
        del self._playing[ticket.id]
        await self._send(ticket.id)

    async def _play_one(self, ticket: Ticket, index: int) -> Trajectory:
        trajectory = await self._play(ticket, index)
        try:
            rules = self._settings.rules
            check_trajectory(
                trajectory,
                placeholder_id=rules.placeholder_id,
                banned_ids=rules.banned_ids,
                vocab_size=rules.vocab_size,
            )
        except WireError as error:
            self._log.warning("an episode of ticket %s breaks the contract: %s", ticket.id, error)
            return failed_trajectory(f"wire: {error}")
        return trajectory

    async def _send(self, ticket_id: str) -> None:
        group = self._finished[ticket_id]
        try:
            sent = await self._dealer.send(group)
        except WireError as error:
            self._log.error("the group of ticket %s cannot be sent: %s", ticket_id, error)
            failed = failed_trajectory(f"wire: {error}")
            self._finished[ticket_id] = Group(ticket_id, group.actor, (failed,) * len(group.trajectories))
            sent = await self._dealer.send(self._finished[ticket_id])
        if sent:
            self._sent[ticket_id] = time.monotonic()


def failed_trajectory(error: str) -> Trajectory:
    """An episode of which nothing can be used."""
    empty_i, empty_f, empty_u = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8)
    return Trajectory(empty_i, empty_u, empty_f, empty_i, (), 0.0, (), Ending.WIRE_ERROR, error=error)


class _IdleMeter:
    """The share of time in which no group was being played; entered once for each group."""

    def __init__(self) -> None:
        self._playing = 0
        self._idle_s = 0.0
        self._since = self._began = time.monotonic()

    def __enter__(self) -> None:
        self._advance()
        self._playing += 1

    def __exit__(self, *_: object) -> None:
        self._advance()
        self._playing -= 1

    def _advance(self) -> None:
        now = time.monotonic()
        if not self._playing:
            self._idle_s += now - self._since
        self._since = now

    def read(self) -> float:
        """The share since the last read, 0..1."""
        self._advance()
        span, idle_s = self._since - self._began, self._idle_s
        self._began, self._idle_s = self._since, 0.0
        return min(1.0, idle_s / span) if span > 0 else 1.0
