"""What the learner answers to each message of an actor. One thread at a time; `learner.tickets.server` sees to that."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learner.tickets.actors import Actor, wait_in_words
from learner.tickets.book import TicketBook, Verdict
from learner.tickets.failure_rate import Endings, FailureRate
from learner.tickets.selection_bias import SelectionMeter
from shared.codec import Frame, Message, TokenRules, WireError, check_trajectory
from shared.engines.urls import ENGINES, unusable
from shared.guards.refusals import Refusals
from shared.log import get_logger
from shared.transport import Router, Secure, Sent, SocketSettings
from shared.types import Ack, Bye, Cancel, Group, Hello, Receipt, Refusal, Request, Stop, Ticket, Tickets, Welcome

TICKETS_PER_MESSAGE = 16
IDS_PER_MESSAGE = 1024
CANCELS_PER_HELLO = 8  # far fewer than a peer's queue holds; what is left over is named again in the next Hello
RECEIPTS_PER_MESSAGE = 4  # few, so that an actor that sends without a pause need not wait
KEPT_MISFITS = 1000


@dataclass(frozen=True, slots=True)
class TicketServerSettings:
    address: str
    run_dir: Path
    run_id: str
    rules: TokenRules
    actor_timeout_s: float = 10.0  # an actor silent for so long is gone
    sockets: SocketSettings = field(default_factory=SocketSettings)
    secure: Secure | None = None
    check: Callable[[Group], None] | None = None  # raises ValueError for a group that no step could train on
    max_failure_share: float = 1.0  # of the last episodes; beyond it the learner's waits raise TooManyFailures
    keep_failed: int = 0  # groups without any sound episode that are kept to be recorded, the last ones


class TicketProtocol:
    """The actors that are known, and the answers they get. Tickets are issued while `issuing`."""

    def __init__(
        self,
        router: Router,
        book: TicketBook,
        settings: TicketServerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.actors: dict[bytes, Actor] = {}
        self.issuing = False
        self._log = get_logger("tickets")
        self.rejects = Refusals("a message", self._log, settings.run_dir / "rejected")
        self.failures, self.endings = FailureRate(settings.max_failure_share), Endings()
        self._router = router
        self._book = book
        self._settings = settings
        self._clock = clock
        self.selection = SelectionMeter()
        self.failed: deque[tuple[Ticket, Group, str]] = deque(maxlen=settings.keep_failed)  # with the reason
        self._taken: dict[bytes, list[str]] = {}  # tickets whose groups' Receipt is to be sent
        self._misfits: Counter[bytes] = Counter()  # messages of peers that cannot take part

    def engines(self) -> frozenset[str]:
        """The engines that the actors now here have."""
        return frozenset(url for actor in self.actors.values() for url in actor.engine_urls)

    # -------------------------------------------------------------- one message

    def read(self, frames: Sequence[Frame]) -> Message | WireError:
        """Decodes and checks a message; the slow part, which needs no lock. Whatever it does to its reader, it is
        refused."""
        try:
            message = self._router.decode(frames)
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
            except Exception as error:  # noqa: BLE001 - a group's content reaches decoders that are not ours
                return WireError("unreadable", f"{type(error).__name__}: {error}", message.ticket_id)
        return message

    def answer(self, peer: bytes, message: Message | WireError, frames: Sequence[Frame]) -> None:
        """Does what the message asks for. One that cannot be answered is refused, and the run goes on."""
        key = peer.decode("utf-8", "replace")
        try:
            self._answer(peer, key, message, frames)
        except Exception as error:  # noqa: BLE001 - it is this message's, not the run's
            self.rejects.add(key, "unanswerable", f"{type(error).__name__}: {error}", frames)

    def _answer(self, peer: bytes, key: str, message: Message | WireError, frames: Sequence[Frame]) -> None:
        actor = self.actors.get(peer)
        if actor is not None:
            actor.last_seen = self._clock()
        match message:
            case Hello():
                self._greet(peer, key, message)
            case Request(slots):
                if actor is not None:  # else it says Hello soon
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
        misfit = self._misfit(hello)
        if misfit:
            self.rejects.add(key, misfit.reason, misfit.detail)
            self._turn_away(peer, misfit.detail)
            return
        if peer not in self.actors:
            named = f"with engines {', '.join(hello.engine_urls)[:1000]}" if hello.engine_urls else "without engines"
            self._log.info("actor %s is here, %s", key, named)
        slots = self.actors[peer].slots if peer in self.actors else 0
        self.actors[peer] = Actor(key, hello.engine_urls, hello.idle_frac, self._clock(), slots)
        void = self._book.held(key, hello.held)
        others = () if hello.engine_urls else tuple(sorted(self.engines())[:ENGINES])
        self._send(peer, Welcome(self._settings.run_id, self._book.version, self._book.nonce, others))
        for start in range(0, min(len(void), CANCELS_PER_HELLO * IDS_PER_MESSAGE), IDS_PER_MESSAGE):
            self._send(peer, Cancel(void[start : start + IDS_PER_MESSAGE], "the learner has no use for these tickets"))

    def _misfit(self, hello: Hello) -> WireError | None:
        """Why this actor cannot take part."""
        vocab_size = self._settings.rules.vocab_size
        if hello.vocab_size != vocab_size:
            detail = f"vocabulary of {hello.vocab_size} tokens, the learner's has {vocab_size}"
            return WireError("vocab_size", f"{detail}; give actors and learner the same model.path")
        wrong = unusable(hello.engine_urls)
        return WireError("engine_urls", wrong) if wrong else None

    def _accept(self, peer: bytes, key: str, group: Group) -> None:
        others = [other for other in self._book.holders(group.ticket_id) if other != key]
        ticket = self._book.ticket(group.ticket_id)
        verdict = self._book.accept(group, key)
        if ticket is not None and verdict in (Verdict.ACCEPTED, Verdict.DROPPED):
            self.selection.add("finished", ticket, group)
            self.endings.add(group)
            if verdict is Verdict.DROPPED:
                self.selection.add("dropped", ticket, group)
        if verdict in (Verdict.ACCEPTED, Verdict.DROPPED):
            self.failures.add(group)
        if ticket is not None and verdict is Verdict.DROPPED and not any(t.trainable for t in group.trajectories):
            self.failed.append((ticket, group, self._book.last_drop))
        if verdict in (Verdict.ACCEPTED, Verdict.AGAIN):
            self.confirm(peer, group.ticket_id)
        else:
            reason = self._book.last_drop if verdict is Verdict.DROPPED else str(verdict)
            self._send(peer, Refusal(group.ticket_id, reason))
        if verdict is Verdict.ACCEPTED and others:
            for other, actor in list(self.actors.items()):
                if actor.key in others:
                    self._send(other, Cancel((group.ticket_id,), "another actor was faster"))

    def confirm(self, peer: bytes, ticket_id: str) -> None:
        """A Receipt for some groups together, or when `confirm_all` is called."""
        taken = self._taken.setdefault(peer, [])
        taken.append(ticket_id)
        if len(taken) == RECEIPTS_PER_MESSAGE:
            del self._taken[peer]
            self._send(peer, Receipt(tuple(taken)))

    def confirm_all(self) -> None:
        while self._taken:
            peer, taken = self._taken.popitem()
            self._send(peer, Receipt(tuple(taken)))

    def _refuse(self, peer: bytes, key: str, error: WireError, frames: Sequence[Frame]) -> None:
        self.rejects.add(key, error.reason, error.detail, frames)
        if error.reason == "schema_version":
            self._turn_away(peer, error.detail)
        if error.ticket_id:
            if key in self._book.holders(error.ticket_id):
                if error.reason == "unusable":
                    self.failures.refused(f"{error.reason}: {error.detail}")
                self._book.reject(error.ticket_id, f"malformed_{error.reason}", error.detail)
            self._send(peer, Refusal(error.ticket_id, str(error)))

    def _turn_away(self, peer: bytes, reason: str) -> None:
        """Tells an actor that cannot take part to stop, at its second message: a single one may have been damaged."""
        if peer in self.actors:
            return
        self._misfits[peer] += 1
        if self._misfits[peer] > 1:
            self._router.send(peer, Stop(reason, failed=True))
        if len(self._misfits) > KEPT_MISFITS:
            self._misfits.clear()

    # -------------------------------------------------------------- between messages

    def tick(self, drained: bool) -> None:
        """Receipts, leases, actors that fell silent (if all that came was read: `drained`), tickets for free slots."""
        self.confirm_all()
        late = self._clock() - self._settings.actor_timeout_s
        for peer, actor in list(self.actors.items()):
            if drained and actor.last_seen < late:
                self.forget(peer, f"silent for {self._settings.actor_timeout_s:g} s")
        over = self._book.expire()
        if over:
            self._log.warning("lease over, to be issued again: %s", ", ".join(over))
        self._acknowledge()
        if self.issuing:
            self._issue()

    def forget(self, peer: bytes, why: str, *, left: bool = False) -> None:
        """An actor is not here any more; one that `left` does not come back."""
        actor = self.actors.pop(peer, None)
        if actor is not None:
            self._log.info("actor %s is gone (%s)", actor.key, why)
            self._book.actor_gone(actor.key, left=left)

    def _acknowledge(self) -> None:
        """An acknowledgment that is lost comes as a Cancel, once the actor names the ticket again."""
        due = self._book.acknowledgments()
        for peer, actor in list(self.actors.items()) if due else ():
            ticket_ids = due.get(actor.key, [])
            for start in range(0, len(ticket_ids), IDS_PER_MESSAGE):
                self._send(peer, Ack(tuple(ticket_ids[start : start + IDS_PER_MESSAGE])))

    def _issue(self) -> None:
        """Gives one ticket to each actor with a free slot in turn, as long as there are tickets and free slots."""
        given: dict[bytes, list[Ticket]] = {}
        free = {peer: actor.slots - self._book.holding(actor.key) for peer, actor in self.actors.items()}
        wanting = [peer for peer, places in free.items() if places > 0]
        while wanting:
            for peer in list(wanting):
                before = self._book.issued
                ticket = self._book.issue(self.actors[peer].key)
                if ticket is not None:
                    if self._book.issued > before:
                        self.selection.issued(ticket)
                    given.setdefault(peer, []).append(ticket)
                    free[peer] -= 1
                if ticket is None or not free[peer]:
                    wanting.remove(peer)
        for peer, tickets in given.items():
            for start in range(0, len(tickets), TICKETS_PER_MESSAGE):
                self._give(peer, tickets[start : start + TICKETS_PER_MESSAGE])

    def _give(self, peer: bytes, tickets: list[Ticket]) -> None:
        """In as few messages as can carry them. A ticket that is too large for any is dropped; WireError for one that
        holds what no message can."""
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
        """One line: what has arrived, what is missing, and which actors hold it."""
        here, rejected, now = list(self.actors.values()), self.rejects.counts, self._clock()
        return wait_in_words(self._book, here, rejected, issuing=self.issuing, now=now, address=address)

    def send_stop(self, stop: Stop) -> None:
        for peer in list(self.actors):
            self._send(peer, stop)

    def _send(self, peer: bytes, message: Message) -> None:
        """A message lost to a full queue comes again: after the next Hello, or when the ticket counts as lost."""
        if self._router.send(peer, message) is Sent.GONE:
            self.forget(peer, "its connection is closed")
