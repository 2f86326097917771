"""The learner's answer to each message of an actor. Not thread-safe: `learner.tickets.ticket_server` serializes the
calls."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from learner.tickets.leases import name_of
from learner.tickets.member_health import EndingCounts, MemberHealth, host_of
from learner.tickets.selection_bias import SelectionMeter
from learner.tickets.ticket_book import GroupVerdict, TicketBook
from learner.tickets.ticket_records import TicketState, parse_ticket_id
from shared.agreement import difference
from shared.clocks import clock_name
from shared.engine_urls import MAX_ENGINES, engine_urls_error
from shared.log import get_logger
from shared.types import (
    Ack,
    AgreedSetting,
    Bye,
    Cancel,
    Group,
    Hello,
    PolicyVersion,
    Receipt,
    Refusal,
    Request,
    Stop,
    Ticket,
    Tickets,
    Welcome,
)
from shared.util.refusals import Refusals
from shared.util.repeated_lines import RepeatedLines
from shared.wire.codec import Frame, Message, TokenRules, WireError, check_trajectory, decode
from shared.wire.endpoints import Delivery, EndpointSettings, LearnerEndpoint, LearnerKeys

TICKETS_PER_MESSAGE = 16
IDS_PER_MESSAGE = 1024
# Far fewer than a peer's queue holds; the actor names the remaining tickets again in its next Hello.
CANCELS_PER_HELLO = 8
RECEIPTS_PER_MESSAGE = 4  # few, so that an actor that sends without a pause need not wait
NAMED_ACTORS = 8  # actors that one line of the log names
MAX_ACTORS = 4096  # actors that are known at once
LINES_OF_ONE_NAME = 16  # lines a minute about the coming, or the going, of actors with one name
NAMED_TICKETS = 8  # tickets that one line of the log names
MAX_UNPROVEN = 64  # faults of engines whose tokens are refused, the latest ones
MAX_TRACES = 1024  # groups whose spans are kept until the learner takes them
MAX_INCOMPATIBLE = 1000  # number of peers that are remembered


@dataclass(frozen=True, slots=True)
class TicketServerSettings:
    """The ticket server's address, and the rules by which it checks actors and their groups."""

    address: str
    run_dir: Path
    run_id: str
    rules: TokenRules
    actor_timeout_s: float = 10.0  # an actor that is silent for so long counts as gone
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    keys: LearnerKeys | None = None
    check: Callable[[Group], None] | None = None  # raises ValueError for a group that no step could train on
    # Largest share of failures among an actor's last episodes; above it, the actor is paused. The learner's waits raise
    # TooManyFailures when no actor is below it.
    max_failure_share: float = 1.0
    # Number of the latest groups without any sound episode that are kept for recording.
    keep_failed: int = 0
    # What must agree with the actors', see shared/agreement.py; empty: nothing is compared.
    agreed: Mapping[str, AgreedSetting] = field(default_factory=dict)


@dataclass(slots=True)
class KnownActor:
    """One actor process as the learner knows it; `key` is `NAME#RANDOM`."""

    key: str
    engine_urls: tuple[str, ...]
    idle_frac: float
    last_seen: float
    slots: int = 0  # groups that it can play at once
    # Under what its failures are counted: the name that all its processes share; its key if another one that is here
    # has the same name.
    member: str = ""


@dataclass(frozen=True, slots=True)
class UnprovenTokens:
    """Tokens of versions `first` to `last` that the engine at `url` may have sampled with wrong weights."""

    url: str
    first: PolicyVersion
    last: PolicyVersion

    def may_hold(self, group: Group, engine_urls: Collection[str]) -> bool:
        """Tell whether a group of an actor with these engines may have such tokens. An actor without engines of its own
        plays on any."""
        if engine_urls and self.url not in {url.rstrip("/") for url in engine_urls}:
            return False
        versions = (trajectory.policy_versions for trajectory in group.trajectories)
        return any(((self.first <= v) & (v <= self.last)).any() for v in versions)


class TicketProtocol:
    """The connected actors, and the answers to their messages. Tickets are issued only while `issuing` is true."""

    def __init__(
        self,
        endpoint: LearnerEndpoint,
        book: TicketBook,
        settings: TicketServerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.actors: dict[bytes, KnownActor] = {}
        self.issuing = False
        self._log = get_logger("tickets")
        self._lines = RepeatedLines(self._log, clock, at_once=LINES_OF_ONE_NAME)
        self.rejects = Refusals("a message", self._log, settings.run_dir / "rejected")
        self.health, self.endings = MemberHealth(settings.max_failure_share, self._log, clock), EndingCounts()
        self._sound: frozenset[str] | None = None  # keys of the actors that can play and are not paused; None: unknown
        self._endpoint = endpoint
        self._book = book
        self._settings = settings
        self._clock = clock
        self.selection = SelectionMeter()
        book.avoided = self._avoided
        self.failed: deque[tuple[Ticket, Group, str]] = deque(maxlen=settings.keep_failed)  # (ticket, group, reason)
        self.traces_new = False  # whether tickets issued now are traced
        self.traces_kept = False  # whether spans that come are kept
        self.traces: deque[tuple[str, bytes]] = deque(maxlen=MAX_TRACES)  # (actor, its group's spans)
        self._unproven: deque[UnprovenTokens] = deque(maxlen=MAX_UNPROVEN)
        self._taken: dict[bytes, list[str]] = {}  # peer -> tickets whose Receipt is still to be sent
        self._incompatible: Counter[bytes] = Counter()  # number of messages from each peer that cannot take part

    def engines(self) -> frozenset[str]:
        """Return the URLs of the actors' engines: `MAX_ENGINES` in all, those of actors that name few first."""
        urls: dict[str, None] = {}
        for actor in sorted(self.actors.values(), key=lambda actor: len(actor.engine_urls)):
            urls |= dict.fromkeys(actor.engine_urls)
            if len(urls) >= MAX_ENGINES:
                break
        return frozenset(list(urls)[:MAX_ENGINES])

    def players(self) -> set[str]:
        """Return the connected actors that can play, by the names under which their failures are counted."""
        return {actor.member for actor in self.actors.values() if actor.slots}

    def check_failures(self) -> None:
        """Raise TooManyFailures if no actor is sound."""
        self.health.check(self.players())

    def _avoided(self, state: TicketState) -> set[str]:
        """Return the keys of the actors that should rather not play a ticket: those of the hosts that failed it, if
        there is a sound actor on another host; otherwise those that failed it, if there is any other sound actor."""
        failed, sound = set(state.failed_by), self._find_sound()
        hosts = {host_of(key) for key in failed}
        if any(host_of(key) not in hosts for key in sound):
            return failed | {actor.key for actor in self.actors.values() if host_of(actor.key) in hosts}
        return failed if sound - failed else set()

    def _member_of(self, key: str) -> str:
        """Return the name under which the failures of an actor process are counted."""
        actor = self.actors.get(key.encode())
        if actor is not None:
            return actor.member
        name = name_of(key)
        return key if any(actor.member == name for actor in self.actors.values()) else name

    # -------------------------------------------------------------- one message

    def read(self, frames: Sequence[Frame]) -> Message | WireError:
        """Decode and check a message; return it, or the reason for its refusal as a WireError. No content raises an
        error.

        This is the slow part; it needs no lock.
        """
        try:
            message = decode(frames, self._endpoint.limits)
        except WireError as error:
            return error
        if isinstance(message, Group):
            try:
                for trajectory in message.trajectories:
                    check_trajectory(trajectory, self._settings.rules)
                if self._settings.check is not None:
                    self._settings.check(message)
            except WireError as error:
                error.ticket_id = message.ticket_id
                return error
            except ValueError as error:
                return WireError("unusable", str(error), message.ticket_id)
            except Exception as error:  # noqa: BLE001 - third-party decoders read a group's content
                return WireError("unreadable", f"{type(error).__name__}: {error}", message.ticket_id)
        return message

    def answer(self, peer: bytes, message: Message | WireError, frames: Sequence[Frame]) -> None:
        """Do what the message asks for. A message that raises an error is refused, and the run continues."""
        key = peer.decode("utf-8", "replace")
        try:
            self._answer(peer, key, message, frames)
        except Exception as error:  # noqa: BLE001 - an error in one message must not end the run
            self.rejects.add(key, "unanswerable", f"{type(error).__name__}: {error}", frames)

    def _answer(self, peer: bytes, key: str, message: Message | WireError, frames: Sequence[Frame]) -> None:
        actor = self.actors.get(peer)
        if actor is not None:
            actor.last_seen = self._clock()
        match message:
            case Hello():
                self._greet(peer, key, message)
            case Request(slots):
                if actor is not None:  # otherwise the actor sends Hello soon
                    actor.slots = slots
            case Group():
                self._accept(peer, key, message)
            case Bye(reason):
                self.forget(peer, f"left: {reason[:300]}", left=True)
            case WireError():
                self._refuse(peer, key, message, frames)
            case _:
                wrong = WireError("wrong_direction", f"{type(message).__name__} is a message of the learner's")
                self._refuse(peer, key, wrong, frames)

    def _greet(self, peer: bytes, key: str, hello: Hello) -> None:
        wrong = self._incompatibility(key, hello)
        if wrong:
            self.rejects.add(key, wrong.reason, wrong.detail)
            self._turn_away(peer, wrong.detail)
            return
        if peer not in self.actors:
            if len(self.actors) >= MAX_ACTORS:
                self.rejects.add(key, "too_many_actors", f"{MAX_ACTORS} actors are here")
                return
            named = f"with engines {', '.join(hello.engine_urls)[:1000]}" if hello.engine_urls else "without engines"
            self._lines.add(logging.INFO, f"the comings of {name_of(key)}", f"actor {key} is here, {named}")
        member = self._member_of(key)
        self.health.see(member, new=peer not in self.actors)
        slots = self.actors[peer].slots if peer in self.actors else 0
        self.actors[peer] = KnownActor(key, hello.engine_urls, hello.idle_frac, self._clock(), slots, member)
        held = self._book.holding(key)
        void = self._book.reconcile_held(key, hello.held)
        if self._book.holding(key) < held:
            self.health.add_lost(member, "it does not list tickets that were sent to it", self.players)
        others = () if hello.engine_urls else tuple(sorted(self.engines())[:MAX_ENGINES])
        version, process = self._book.version, self._book.nonce
        clock = hello.clock_s, self._clock(), clock_name()
        self._send(peer, Welcome(self._settings.run_id, version, process, others, *clock))
        for start in range(0, min(len(void), CANCELS_PER_HELLO * IDS_PER_MESSAGE), IDS_PER_MESSAGE):
            self._send(peer, Cancel(void[start : start + IDS_PER_MESSAGE], "the learner has no use for these tickets"))

    def _incompatibility(self, key: str, hello: Hello) -> WireError | None:
        """Return the reason why this actor cannot take part; None if it can."""
        vocab_size = self._settings.rules.vocab_size
        if hello.vocab_size != vocab_size:
            detail = f"vocabulary of {hello.vocab_size} tokens, the learner's has {vocab_size}"
            return WireError("vocab_size", f"{detail}; give actors and learner the same model.path")
        if differs := difference(self._settings.agreed, key, hello.settings):
            # One reason for each of the learner's own settings, so that each is logged, and their number is bounded.
            name = differs.partition(":")[0]
            reason = f"settings: {name}" if name in self._settings.agreed else "settings"
            return WireError(reason, f"{differs}; start both with the same recipe and files")
        error = engine_urls_error(hello.engine_urls)
        return WireError("engine_urls", error) if error else None

    def refuse_engine(self, url: str, first: PolicyVersion, last: PolicyVersion) -> int:
        """Refuse from now on what an engine with wrong weights may have sampled as versions `first` to `last`. Drop
        such groups that wait for their step; return their number."""
        self._unproven.append(UnprovenTokens(url, first, last))
        return self._book.drop_unproven(self._is_unproven)

    def _is_unproven(self, key: str, group: Group) -> bool:
        """Tell whether an engine with wrong weights may have sampled a group of an actor."""
        if not self._unproven:
            return False
        actor = self.actors.get(key.encode())
        urls = actor.engine_urls if actor is not None else ()
        return any(tokens.may_hold(group, urls) for tokens in self._unproven)

    def _accept(self, peer: bytes, key: str, group: Group) -> None:
        if self._is_unproven(key, group) and self._book.refuse_unproven(group.ticket_id, key) is not None:
            self._send(peer, Refusal(group.ticket_id, GroupVerdict.UNPROVEN.value))
            return
        others = [other for other in self._book.holders(group.ticket_id) if other != key]
        ticket = self._book.ticket(group.ticket_id)
        self._sound = None
        verdict = self._book.accept(group, key)
        read = verdict in (GroupVerdict.ACCEPTED, GroupVerdict.DROPPED, GroupVerdict.RETRIED)
        if ticket is not None and read:
            self.endings.add(group)
            if verdict is not GroupVerdict.RETRIED:
                self.selection.add("finished", ticket, group)
            if verdict is GroupVerdict.DROPPED:
                self.selection.add("dropped", ticket, group)
        if group.spans and read and self.traces_kept:
            self.traces.append((name_of(key), group.spans))
        if read:
            self._judge(key, group, verdict)
        elif verdict is GroupVerdict.OUTDATED and parse_ticket_id(group.ticket_id)[1] == self._book.nonce:
            self.blame(key, "outdated: its engine has weights that a restart of the learner has undone", lasting=False)
        if ticket is not None and verdict is GroupVerdict.DROPPED and not any(t.trainable for t in group.trajectories):
            self.failed.append((ticket, group, self._book.last_drop))
        if verdict in (GroupVerdict.ACCEPTED, GroupVerdict.AGAIN):
            self.confirm(peer, group.ticket_id)
        else:
            reason = self._book.last_drop if read else str(verdict)
            self._send(peer, Refusal(group.ticket_id, reason))
        if verdict is GroupVerdict.ACCEPTED and others:
            for other, actor in list(self.actors.items()):
                if actor.key in others:
                    self._send(other, Cancel((group.ticket_id,), "another actor was faster"))

    def _judge(self, key: str, group: Group, verdict: GroupVerdict) -> None:
        """Record whether a group's episodes failed."""
        if verdict is not GroupVerdict.ACCEPTED and self._book.last_drop.startswith("wrong_group_size"):
            self.blame(key, self._book.last_drop)
        else:
            self.health.add(self._member_of(key), group, self.players)

    def blame(self, key: str, reason: str, *, lasting: bool = True) -> None:
        """Record that a whole group of an actor is of no use."""
        self.health.add_refused(self._member_of(key), reason, self.players, lasting=lasting)

    def confirm(self, peer: bytes, ticket_id: str) -> None:
        """Add a ticket to the peer's next Receipt, which is sent at `RECEIPTS_PER_MESSAGE` tickets or by
        `confirm_all`."""
        taken = self._taken.setdefault(peer, [])
        taken.append(ticket_id)
        if len(taken) == RECEIPTS_PER_MESSAGE:
            del self._taken[peer]
            self._send(peer, Receipt(tuple(taken)))

    def confirm_all(self) -> None:
        """Send all Receipts that are still to be sent."""
        while self._taken:
            peer, taken = self._taken.popitem()
            self._send(peer, Receipt(tuple(taken)))

    def _refuse(self, peer: bytes, key: str, error: WireError, frames: Sequence[Frame]) -> None:
        self.rejects.add(key, error.reason, error.detail, frames)
        if error.reason == "schema_version":
            self._turn_away(peer, error.detail)
        if error.ticket_id:
            if key in self._book.holders(error.ticket_id):
                self._sound = None
                self._book.reject(error.ticket_id, f"malformed_{error.reason}", error.detail, key)
                self.blame(key, f"{error.reason}: {error.detail}")
            self._send(peer, Refusal(error.ticket_id, str(error)))

    def _turn_away(self, peer: bytes, reason: str) -> None:
        """Tell an actor that cannot take part to stop, but only at its second message: a single one may have been
        damaged."""
        if peer in self.actors:
            return
        self._incompatible[peer] += 1
        if self._incompatible[peer] > 1:
            self._endpoint.send(peer, Stop(reason, failed=True))
        if len(self._incompatible) > MAX_INCOMPATIBLE:
            self._incompatible.clear()

    # -------------------------------------------------------------- between messages

    def tick(self, drained: bool) -> None:
        """Do what is due between messages: send Receipts, end leases, forget silent actors, issue tickets for free
        slots.

        `drained`: all messages that arrived have been read. Only then can an actor count as silent.
        """
        self.confirm_all()
        self._lines.flush()
        late = self._clock() - self._settings.actor_timeout_s
        for peer, actor in list(self.actors.items()):
            if drained and actor.last_seen < late:
                self.forget(peer, f"silent for {self._settings.actor_timeout_s:g} s")
        over = self._book.expire()
        if over:
            more = f" and {len(over) - NAMED_TICKETS} more" if len(over) > NAMED_TICKETS else ""
            self._log.warning("lease over, to be issued again: %s%s", ", ".join(over[:NAMED_TICKETS]), more)
        self._acknowledge()
        if self.issuing:
            self._issue()

    def forget(self, peer: bytes, why: str, *, left: bool = False) -> None:
        """Forget an actor that is gone; `left` means that it said Bye and will not come back."""
        actor = self.actors.pop(peer, None)
        if actor is not None:
            self._lines.add(logging.INFO, f"the goings of {name_of(actor.key)}", f"actor {actor.key} is gone ({why})")
            if not left and self._book.holding(actor.key):
                self.health.add_lost(actor.member, f"gone with tickets ({why})", self.players)
            self._book.actor_gone(actor.key, left=left)

    def _acknowledge(self) -> None:
        """Send all due acknowledgments. If one is lost, the actor gets a Cancel instead when it names the ticket
        again."""
        due = self._book.acknowledgments()
        for peer, actor in list(self.actors.items()) if due else ():
            ticket_ids = due.get(actor.key, [])
            for start in range(0, len(ticket_ids), IDS_PER_MESSAGE):
                self._send(peer, Ack(tuple(ticket_ids[start : start + IDS_PER_MESSAGE])))

    def _issue(self) -> None:
        """Issue tickets to the actors with free slots, one to each in turn, until tickets or slots run out."""
        given: dict[bytes, list[Ticket]] = {}
        free = self._free_slots()
        wanting = [peer for peer, slots in free.items() if slots > 0]
        while wanting:
            for peer in list(wanting):
                before = self._book.issued
                ticket = self._book.issue(self.actors[peer].key)
                if ticket is not None:
                    if self._book.issued > before:
                        self.selection.add_issued(ticket)
                    sent = replace(ticket, traced=True) if self.traces_new else ticket
                    given.setdefault(peer, []).append(sent)
                    free[peer] -= 1
                if ticket is None or not free[peer]:
                    wanting.remove(peer)
        for peer, tickets in given.items():
            if scope := self.health.paused(self.actors[peer].member):
                self.health.begin_trial(scope)
            for start in range(0, len(tickets), TICKETS_PER_MESSAGE):
                self._give(peer, tickets[start : start + TICKETS_PER_MESSAGE])

    def _find_sound(self) -> frozenset[str]:
        if self._sound is None:
            sound = (a.key for a in self.actors.values() if a.slots and not self.health.paused(a.member))
            self._sound = frozenset(sound)
        return self._sound

    def _free_slots(self) -> dict[bytes, int]:
        """Return how many more tickets each actor may get, those with the fewest failures first. One that is paused
        gets none; after its pause it gets one, while it and, if the whole host was paused, its neighbours hold none."""
        self._sound = None
        sound = self._find_sound()
        on_trial = Counter[str]()  # tickets that paused actors and hosts hold
        for actor in self.actors.values():
            if scope := self.health.paused(actor.member):
                on_trial[scope] += self._book.holding(actor.key)
        free: dict[bytes, int] = {}
        for peer, actor in sorted(self.actors.items(), key=lambda item: self.health.failed_share(item[1].member)):
            slots = actor.slots - self._book.holding(actor.key)
            if slots > 0 and (scope := self.health.paused(actor.member)):
                slots = int(not on_trial[scope] and self.health.may_try(scope, alone=not sound))
                on_trial[scope] += slots
            free[peer] = slots
        return free

    def _give(self, peer: bytes, tickets: list[Ticket]) -> None:
        """Send tickets in as few messages as possible. Drop a ticket that is too large for any message.

        Raise WireError if a ticket holds a value that cannot be encoded.
        """
        try:
            self._send(peer, Tickets(tuple(tickets)))
        except WireError as error:
            if error.reason not in ("too_large", "too_many"):
                raise
            if half := len(tickets) // 2:
                self._give(peer, tickets[:half])
                self._give(peer, tickets[half:])
            else:
                ticket = tickets[0]
                self._log.error("sample %.200r cannot be sent to an actor: %s", ticket.sample.id, error)
                self._book.reject(ticket.id, "unsendable", f"sample {ticket.sample.id}: {error}")

    def describe_wait(self, address: str) -> str:
        """Return one line: what has arrived, what is missing, and which actors hold it. `address` is the learner's."""
        book = self._book
        actors = list(self.actors.values())
        now = self._clock()
        num_open = book.open + book.evaluations.open
        parts = [f"{book.ready} groups ready, {num_open} tickets open, version {book.version}"]
        if not self.issuing:
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
        if paused := self.health.describe():
            parts.append(paused)
        if book.dropped:
            parts.append(f"dropped {dict(book.dropped)}, last {book.last_drop!r}")
        if book.refused:
            parts.append(f"refused {dict(book.refused)}")
        if self.rejects.counts:
            parts.append(f"rejected messages {dict(self.rejects.counts)}")
        return "; ".join(parts)

    def send_stop(self, stop: Stop) -> None:
        """Tell all actors to stop."""
        for peer in list(self.actors):
            self._send(peer, stop)

    def _send(self, peer: bytes, message: Message) -> None:
        """Send a message. If a full queue drops it, it is sent again after the next Hello, or when the ticket counts as
        lost."""
        if self._endpoint.send(peer, message) is Delivery.GONE:
            self.forget(peer, "its connection is closed")
