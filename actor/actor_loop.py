"""An actor process: tickets in, groups of episodes out.

    learner ──Tickets──▶ HeldTickets ──(ticket, index)──▶ play ──▶ env and engine
       ▲                  │       ▲                        │
       └── Group until Ack┘       └────── Trajectory ◀─────┘

The learner issues at most `groups` tickets at a time, and counts a ticket as held until it has received its group. So
an actor whose learner is slow or away stops by itself once it holds that many.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from actor.episode import Stream
from actor.journal import Journal
from actor.named_engines import NamedEngines
from shared.clocks import ClockOffset
from shared.log import get_logger
from shared.spans import MOST_OF_GROUP, SpanBuffer, add_span, on_track, packed_spans, recorded_into, span
from shared.types import (
    Ack,
    AgreedSetting,
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
from shared.util.refusals import Refusals
from shared.util.repeated_lines import RepeatedLines
from shared.wire.codec import Limits, Message, TokenRules, WireError, check_trajectory, encode
from shared.wire.endpoints import ActorEndpoint, ActorKeys, EndpointSettings
from shared.wire.transports import connect

Play = Callable[[Ticket, int], Awaitable[Trajectory]]
"""Plays one episode of a ticket, given its index in the group. A failure in it is its ending, not an exception."""

RECONNECT_S = 0.1
FAILED = "failed"  # exit reason of an actor that has raised an exception
EXIT_NO_LEARNER = 3  # exit code: the learner is silent, has failed, or refuses this actor


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """An actor's settings: its learner, its engines, how much it plays and how long it waits."""

    name: str
    learner: str  # address
    engine_urls: tuple[str, ...]  # the actor's own engines; empty = it plays on those that the learner names
    rules: TokenRules
    groups: int = 16  # number of groups played at once; 0 = it only names its engines
    connect_timeout_s: float = 60.0  # the actor ends if no learner answers within this time
    reconnect_timeout_s: float = 600.0  # the same after a learner has answered once
    heartbeat_s: float = 2.0
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    keys: ActorKeys | None = None
    agreed: Mapping[str, AgreedSetting] = field(default_factory=dict)  # what must agree with the learner's


class ActorExit(NamedTuple):
    """Why an actor ends, and its process's exit code: 0, or 1 after a failure."""

    code: int
    reason: str


async def run_actor(
    settings: ActorSettings, play: Play, journal: Journal | None = None, named: NamedEngines | None = None
) -> int:
    """Play the learner's tickets until it sends Stop, beginning with the tickets left open in the `journal`; `named` is
    the pool of engines that the learner names. Return the process's exit code: 0, or 1 with one log line.
    The actor waits for the learner's messages and the next heartbeat, but at most `connect_timeout_s` for the first
    answer, and `reconnect_timeout_s` for a learner that has gone silent. An exception of `play` ends the actor and is
    raised. Raise ValueError if the address cannot be used.
    """
    endpoint = connect(settings.learner, settings.name, settings.endpoint, settings.keys)
    exit_reason = FAILED
    held_tickets = None
    try:
        async with asyncio.TaskGroup() as tasks:
            held_tickets = HeldTickets(settings, play, endpoint, tasks, journal)
            end = await Conversation(settings, endpoint, held_tickets, named).run()
            exit_reason = end.reason
            get_logger(settings.name).log(logging.ERROR if end.code else logging.INFO, "%s", exit_reason)
            held_tickets.drop(held_tickets.held(), exit_reason)
        return end.code
    except asyncio.CancelledError:
        exit_reason = "asked to stop"
        raise
    finally:
        if held_tickets is not None:
            held_tickets.lines.flush(end=True)
        if journal is None or exit_reason != FAILED:  # else the next process continues its tickets
            await endpoint.send(Bye(exit_reason))
            if journal:
                journal.close()
        endpoint.close(linger_s=0.5)


class Conversation:
    """An actor's exchange with the learner: it sends heartbeats on time and handles each message of the learner."""

    def __init__(
        self,
        settings: ActorSettings,
        endpoint: ActorEndpoint,
        held_tickets: HeldTickets,
        named: NamedEngines | None = None,
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._held_tickets = held_tickets
        self._named = named
        self._process_id: str | None = None  # id of the learner process that has welcomed this actor
        self._other_schemas = 0  # number of messages with another schema version
        self._log = get_logger(settings.name)
        self._refusals = Refusals("a message", self._log)

    async def run(self) -> ActorExit:
        """Send heartbeats and handle messages until the actor should end; return why."""
        last_message = time.monotonic()
        next_beat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                connected = await self._held_tickets.beat(engines=not self._named or bool(self._named.clients))
                next_beat = now + (self._settings.heartbeat_s if connected else RECONNECT_S)
            try:
                message = await self._endpoint.receive(next_beat - now)
            except WireError as error:
                end = self._malformed(error)
            else:
                now = time.monotonic()
                end = self._silent(now - last_message) if message is None else await self._contained(message)
                last_message = last_message if message is None else now
            if end is not None:
                return end

    async def _contained(self, message: Message) -> ActorExit | None:
        """Handle a message; if that fails, count the message as refused and go on."""
        try:
            return await self.handle(message)
        except Exception as error:  # noqa: BLE001 - a failure of this message alone
            return self._malformed(WireError("unanswerable", f"{type(error).__name__}: {error}"))

    async def handle(self, message: Message) -> ActorExit | None:
        """Handle a message of the learner; return the actor's exit if the message ends it, else None."""
        tickets, log = self._held_tickets, self._log
        match message:
            case Tickets(issued):
                for ticket in issued:
                    tickets.take(ticket)
            case Receipt(ticket_ids):
                tickets.keep(ticket_ids)
            case Refusal(ticket_id, reason):
                tickets.forget((ticket_id,))
                line = f"the learner refused the group of ticket {ticket_id}: {reason}"
                tickets.lines.add(logging.WARNING, f"a refusal as {reason.partition(':')[0][:100]}", line)
            case Ack(ticket_ids):
                tickets.forget(ticket_ids)
            case Cancel(ticket_ids, reason):
                tickets.drop(ticket_ids, reason)
            case Welcome(run_id, version, process_id, engines, hello_s, clock_s, clock):
                self._held_tickets.clock.measure(clock, hello_s, clock_s, time.monotonic())
                if process_id != self._process_id:
                    log.info("learner %s is here: run %s, version %d", self._settings.learner, run_id, version)
                    await tickets.send_all()
                self._process_id = process_id
                if self._named and (reason := self._named.follow(engines)):
                    return ActorExit(1, reason)
            case Stop(reason, failed):
                return ActorExit(1 if failed or self._process_id is None else 0, f"the learner says stop: {reason}")
        return None

    def _malformed(self, error: WireError) -> ActorExit | None:
        """Count a message as refused; end the actor at the second message with another schema version. One such message
        may be damaged in transit; two come from another version of Pronk."""
        self._other_schemas += error.reason == "schema_version"
        if self._other_schemas > 1 and self._process_id is None:
            return ActorExit(1, f"learner {self._settings.learner}: {error.detail}")
        self._refusals.add("the learner", error.reason, error.detail)
        return None

    def _silent(self, for_s: float) -> ActorExit | None:
        """Return the actor's exit if the learner has been silent for too long, else None."""
        s = self._settings
        known = self._process_id is not None
        if for_s <= (s.reconnect_timeout_s if known else s.connect_timeout_s):
            return None
        cure = "it seems to have died" if known else "start it, or check --actor.learner"
        return ActorExit(1, f"learner {s.learner} is silent for {for_s:.0f} s; {self._endpoint.trouble() or cure}")


@dataclass(slots=True)
class Finished:
    """A group that has been played but not yet acknowledged."""

    group: Group
    sent_at: float = -math.inf
    taken: bool = False  # the learner has received it, but not yet trained on it


class HeldTickets:
    """The tickets that an actor holds: being played, finished, or received by the learner but not yet trained. Groups
    that the learner has received are kept in case it dies before its next checkpoint. The number of tickets that the
    learner issues bounds how much is held.
    """

    def __init__(
        self,
        settings: ActorSettings,
        play: Play,
        endpoint: ActorEndpoint,
        tasks: asyncio.TaskGroup,
        journal: Journal | None = None,
    ) -> None:
        self._settings, self._play, self._endpoint, self._tasks = settings, play, endpoint, tasks
        self._journal = journal
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._finished: dict[str, Finished] = {}
        self._slots = asyncio.Semaphore(settings.groups)
        self._idle = IdleMeter()
        self.clock = ClockOffset()  # to the learner's clock
        self._log = get_logger(settings.name)
        self.lines = RepeatedLines(self._log)
        for ticket in journal.tickets() if journal else ():
            self.take(ticket)

    def held(self) -> tuple[str, ...]:
        """Return the ids of all tickets that the actor holds."""
        return (*self._playing, *self._finished)

    def take(self, ticket: Ticket) -> None:
        """Start playing a ticket, unless it is already held."""
        if ticket.id not in self.held():
            if self._journal:
                self._journal.begin(ticket)
            self._playing[ticket.id] = self._tasks.create_task(self._play_group(ticket))

    def keep(self, ticket_ids: tuple[str, ...]) -> None:
        """Note that the learner has received these groups: they are sent again only to another learner process."""
        for ticket_id in ticket_ids:
            if ticket_id in self._finished:
                self._finished[ticket_id].taken = True
        if self._journal:
            self._journal.end(ticket_ids)

    async def send_all(self) -> None:
        """Send all finished groups again: a new learner process has none of those that an earlier one received."""
        for finished in list(self._finished.values()):
            finished.taken = False
            await self._send(finished)

    def forget(self, ticket_ids: tuple[str, ...]) -> None:
        """Discard the groups of these tickets: the learner has trained on them, or does not want them."""
        for ticket_id in ticket_ids:
            self._finished.pop(ticket_id, None)
        if self._journal:
            self._journal.end(ticket_ids)

    def drop(self, ticket_ids: tuple[str, ...], reason: str) -> None:
        """Stop playing these tickets, and discard their finished groups."""
        for ticket_id in ticket_ids:
            task = self._playing.pop(ticket_id, None)
            if task is not None:
                task.cancel(reason)
        self.forget(ticket_ids)

    async def beat(self, *, engines: bool) -> bool:
        """Send a heartbeat with the held tickets, request more tickets if there are `engines`, and resend groups
        without an answer. Return False if not connected."""
        s = self._settings
        known = s.name, s.engine_urls, s.rules.vocab_size, self.held(), self._idle.read(), dict(s.agreed)
        hello = Hello(*known, clock_s=time.monotonic())
        self.lines.flush()
        connected = await self._endpoint.send(hello) and await self._endpoint.send(Request(s.groups if engines else 0))
        late = time.monotonic() - 2 * s.heartbeat_s
        for finished in list(self._finished.values()) if connected else ():
            if not finished.taken and finished.sent_at <= late:
                await self._send(finished)
        return connected

    async def _play_group(self, ticket: Ticket) -> None:
        asked, buffer = time.monotonic(), SpanBuffer(MOST_OF_GROUP) if ticket.traced else None
        async with self._slots:
            started = time.monotonic()
            with self._idle, recorded_into(buffer, "group"):
                add_span("wait for a place", asked, started, note=ticket.id)
                with span("group", note=ticket.id):
                    async with asyncio.TaskGroup() as episodes:
                        played = [episodes.create_task(self._play_one(ticket, i)) for i in range(ticket.group_size)]
        group = Group(ticket.id, self._settings.name, tuple(p.result() for p in played), time.monotonic() - started)
        if buffer is not None and math.isfinite(self.clock.error_s):
            group = replace(group, spans=packed_spans(buffer, self.clock.add_s))
        finished = self._finished[ticket.id] = Finished(group)
        del self._playing[ticket.id]
        await self._send(finished)

    async def _play_one(self, ticket: Ticket, index: int) -> Trajectory:
        with on_track(f"episode {index}"), span("episode", note=ticket.id):
            trajectory = await self._play(ticket, index)
        if error := validation_error(trajectory, self._settings.rules):
            line = f"an episode of ticket {ticket.id} breaks the contract: {error}"
            self.lines.add(logging.WARNING, f"an episode that breaks the contract: {error.partition(':')[0]}", line)
            return failed_trajectory(error)
        return trajectory

    async def _send(self, finished: Finished) -> None:
        """Send a group; episodes that cannot be sent are replaced by failed ones."""
        try:
            sent = await self._endpoint.send(finished.group)
        except WireError as error:
            finished.group = self._sendable(finished.group, error)
            sent = await self._endpoint.send(finished.group)
        if sent:
            finished.sent_at = time.monotonic()

    def _sendable(self, group: Group, error: WireError) -> Group:
        """Return the group, which `error` keeps from being sent, in a form that can be sent: without its spans if they
        are what is too much."""
        most = self._settings.endpoint.max_message_bytes
        plain = replace(group, spans=b"")
        if group.spans and not _sending_error(plain, Limits(message_bytes=most)):
            return plain
        line = f"the group of ticket {group.ticket_id} cannot be sent: {error}"
        self.lines.add(logging.ERROR, f"a group that cannot be sent: {error.reason}", line)
        return with_failed_trajectories(plain, error, most)


class IdleMeter:
    """Measures the share of time in which no group was being played; entered once for each group."""

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
        """Return the share since the last read, 0..1."""
        self._advance()
        span, idle_s = self._since - self._began, self._idle_s
        self._began, self._idle_s = self._since, 0.0
        return min(1.0, idle_s / span) if span > 0 else 1.0


# An episode that breaks the contract with the learner is replaced by a failed one; the group's other episodes stay.


def failed_trajectory(error: object) -> Trajectory:
    """Return a failed episode with this error, to replace one that cannot be sent."""
    words = str(error).encode(errors="replace").decode()
    return Stream().trajectory((), Ending.WIRE_ERROR, error=f"wire: {words}")


def validation_error(trajectory: Trajectory, rules: TokenRules) -> str:
    """Return what is wrong with a trajectory, which a user's rollout function may have made; "" if nothing is."""
    try:
        check_trajectory(trajectory, rules)
    except WireError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a field has a wrong type
        return f"{type(error).__name__}: {error}"
    return ""


def with_failed_trajectories(group: Group, error: WireError, max_bytes: int) -> Group:
    """Return the group, which `error` keeps from being sent in a message of `max_bytes`, in a form that can be sent.
    Episodes that cannot be sent even by themselves are replaced by failed ones; if there are none, all are."""
    limits = Limits(message_bytes=max_bytes)
    errors = [_sending_error(replace(group, trajectories=(t,)), limits) for t in group.trajectories]
    errors = errors if any(errors) else [str(error)] * len(errors)
    sendable = (failed_trajectory(e) if e else t for t, e in zip(group.trajectories, errors, strict=True))
    return replace(group, trajectories=tuple(sendable))


def _sending_error(group: Group, limits: Limits) -> str:
    try:
        encode(group, limits)
    except WireError as error:
        return str(error)
    return ""
