"""Rank 0's end of the wire: issues tickets to actors, takes their groups, and keeps them until the learner's step.

One thread owns the socket. It consumes Hello, Request, Group and Bye; it produces Welcome, Tickets, Receipt, Ack,
Cancel and Stop. It waits for messages and for the learner, who unblocks it by `open`, `set_version`, `commit`,
`start_evaluation` or `stop`. The learner waits in `next_batch` and `evaluation_result`, and the thread unblocks it
when groups have come.
The memory that groups take here is bounded by the tickets that may be open at once, whatever actors send.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from learner.tickets.ages import Ages
from learner.tickets.book import BookSettings, EvaluationResult, TicketBook
from learner.tickets.protocol import TicketProtocol, TicketServerSettings
from learner.tickets.sources import SampleSource
from shared.log import get_logger
from shared.transport import Router
from shared.types import Bye, Group, PolicyVersion, Sample, Sampling, Stop, Ticket

__all__ = ["Interrupted", "TicketServer", "TicketServerSettings"]
Batch = list[tuple[Ticket, Group]]
Answer = TypeVar("Answer")
TICK_S = 0.2
FAREWELL_S = 2.0
MESSAGES_PER_TICK = 256
POLL_S = 0.5
SAY_EVERY_S = 30.0


class Interrupted(Exception):
    """A wait for groups or results was interrupted by an event."""


class TicketServer:
    """Listens at once, issues tickets from `open` on. Its methods are for one thread, the learner's.

    ValueError: the address cannot be used.
    """

    def __init__(self, source: SampleSource, book: BookSettings, settings: TicketServerSettings) -> None:
        self._log = get_logger("tickets")
        self._router = Router(settings.address, settings.sockets, settings.secure)
        self.address = self._router.address
        self._changed = threading.Condition()  # guards the book and the protocol
        self._book = TicketBook(source, book, nonce=os.urandom(4).hex())
        self._protocol = TicketProtocol(self._router, self._book, settings)
        self._ages, self._stale = Ages(), 0  # groups that were dropped as stale, at the last call of `metrics`
        self._stop: Stop | None = None
        self._silent = False
        self._failure: BaseException | None = None
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._router.watch(self._wake_receive.fileno())
        self._thread = threading.Thread(target=self._run, name="tickets", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- the learner's side

    def open(self, version: PolicyVersion | None = None) -> None:
        """Engines have weights (of `version`): tickets may be issued."""
        with self._changed:
            if version is not None:
                self._book.version = version
            self._protocol.issuing = True
        self._wake()

    def set_version(self, version: PolicyVersion) -> None:
        """The engines have the weights of `version`: more tickets may be issued."""
        with self._changed:
            self._book.version = version
        self._wake()

    def next_batch(self, num_groups: int, timeout_s: float, *interrupts: threading.Event) -> Batch:
        """The oldest `num_groups` groups; they count as trained now, and `commit` follows when they are.

        TimeoutError: it names whom it waited for. Interrupted: one of `interrupts` was set.
        """
        what = f"no batch of {num_groups} groups"
        batch = self._wait(lambda: self._book.take_groups(num_groups), timeout_s, what, *interrupts)
        with self._changed:
            for stage, groups in (("dropped", self._book.take_stale()), ("trained", batch)):
                for ticket, group in groups:
                    self._protocol.selection.add(stage, ticket, group)
            self._ages.add([group for _, group in batch], self._book.version)
        self._wake()  # a group that was too old makes room for a new ticket
        return batch

    def commit(self) -> None:
        """The step on the last batch is done: its actors may forget their groups."""
        with self._changed:
            self._book.commit()
        self._wake()

    def start_evaluation(self, name: str, samples: Sequence[Sample], sampling: Sampling, group_size: int = 1) -> None:
        """Queues one ticket for each sample before all training tickets. ValueError: the name is in use."""
        with self._changed:
            self._book.evaluations.start(name, samples, sampling, group_size, self._book.version)
        self._wake()

    def evaluation_result(self, name: str, timeout_s: float, *interrupts: threading.Event) -> EvaluationResult:
        """Waits for all its tickets; can be asked for once. Raises what `next_batch` raises."""
        with self._changed:
            result = self._book.evaluations.result(name)
        if result is not None:  # it was there before any interrupt
            return result
        what = f"no result of evaluation {name!r}"
        return self._wait(lambda: self._book.evaluations.result(name), timeout_s, what, *interrupts)

    def evaluation_left(self, name: str) -> int:
        """Tickets of a running evaluation that are still open."""
        with self._changed:
            return self._book.evaluations.left(name)

    def engines(self) -> frozenset[str]:
        """The engines that the actors now here have."""
        with self._changed:
            return self._protocol.engines()

    def describe_wait(self) -> str:
        """One line: what has arrived, what is missing, and whom it waits for."""
        with self._changed:
            return self._protocol.describe_wait(self.address)

    @property
    def max_staleness_seen(self) -> int:
        """Of a group that was trained on, in versions."""
        return self._ages.max_seen

    @property
    def process_id(self) -> str:
        return self._book.nonce

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; consistent with the batches that `next_batch` has returned."""
        with self._changed:
            return self._book.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Before `open`."""
        with self._changed:
            self._book.load_state(state)
            self._stale = self._book.dropped["stale"]
            if self._book.withheld:
                self._log.warning(
                    "learner.max_staleness = %d admits fewer open tickets than the checkpoint has: %d are played anew",
                    self._book.settings.max_staleness,
                    len(self._book.withheld),
                )

    def metrics(self) -> dict[str, float]:
        """Counters since the run began, distributions since the last call."""
        with self._changed:
            book, actors = self._book, self._protocol.actors.values()
            values: dict[str, float] = {
                "queue/ready_groups": book.ready,
                "tickets/issued": book.issued,
                "tickets/open": book.open,
                "tickets/open_evaluation": book.evaluations.open,
                "tickets/trained": book.trained,
                "tickets/reissued": book.reissued,
                "tickets/dropped": book.dropped.total(),
                "wire/rejected": self._protocol.rejects.counts.total(),
                "actors/known": len(actors),
            }
            idle = [actor.idle_frac for actor in actors if actor.slots]  # others only name their host's engines
            if idle:
                values["actors/idle_frac"] = sum(idle) / len(idle)
            values |= {f"tickets/dropped/{reason}": n for reason, n in book.dropped.items()}
            values |= {f"tickets/refused/{reason}": n for reason, n in book.refused.items()}
            values |= {f"wire/refused_connections/{reason}": n for reason, n in self._router.refused.items()}
            values |= {f"wire/rejected/{reason}": n for reason, n in self._protocol.rejects.counts.items()}
            values["tickets/stale"], self._stale = book.dropped["stale"] - self._stale, book.dropped["stale"]
            return values | self._protocol.selection.metrics() | self._protocol.endings.drain() | self._ages.drain()

    def take_failed(self) -> list[tuple[Ticket, Group, str]]:
        """The last groups without any sound episode, of those that came since the last call, with the reason."""
        with self._changed:
            failed = list(self._protocol.failed)
            self._protocol.failed.clear()
            return failed

    def selection_table(self) -> str:
        """Markdown: whether what is trained is what was issued."""
        with self._changed:
            return self._protocol.selection.table()

    def go_silently(self) -> None:
        """Closes the socket without a Stop: actors keep their groups and wait for another learner process."""
        with self._changed:
            self._silent = True
        self.stop("the learner shuts down")

    def stop(self, reason: str, *, failed: bool = False) -> None:
        """Tells all actors that the run is over, well or not, and closes the socket. May be called again."""
        with self._changed:
            self._stop = self._stop or Stop(reason, failed)
            self._changed.notify_all()
        self._wake()
        self._thread.join(5.0)

    def _wait(
        self, ask: Callable[[], Answer | None], timeout_s: float, what: str, *interrupts: threading.Event
    ) -> Answer:
        started = said = time.monotonic()
        with self._changed:
            while True:
                if any(event.is_set() for event in interrupts):
                    raise Interrupted
                if self._failure is not None:
                    raise RuntimeError(f"the ticket server stopped: {self._failure}") from self._failure
                if self._stop is not None:
                    raise RuntimeError(f"the ticket server is stopped: {self._stop.reason}")
                self._protocol.failures.check()
                answer = ask()
                if answer is not None:
                    return answer
                now = time.monotonic()
                if now - started >= timeout_s:
                    raise TimeoutError(f"{what} within {timeout_s:g} s: {self._protocol.describe_wait(self.address)}")
                if now - said >= SAY_EVERY_S:
                    said = now
                    self._log.info(
                        "%s since %.0f s: %s", what, now - started, self._protocol.describe_wait(self.address)
                    )
                self._changed.wait(min(POLL_S, started + timeout_s - now))

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while self._stop is None:
                self._router.wait(TICK_S)
                self._serve()
        except BaseException as error:  # noqa: BLE001 - the learner's thread raises it, see _wait
            self._failure = error
        finally:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stop is not None)  # the learner knows whether it comes back
            if not self._silent and self._stop is not None:
                self._send_stop(self._stop)
            self._router.close()
            self._wake_receive.close()
            self._wake_send.close()

    def _send_stop(self, stop: Stop) -> None:
        """Sends Stop until all actors have said Bye or closed their connection; for `FAREWELL_S` at most."""
        say_at = time.monotonic()
        deadline = say_at + FAREWELL_S
        while self._protocol.actors and (now := time.monotonic()) < deadline:
            if now >= say_at:
                self._protocol.send_stop(stop)
                say_at = now + TICK_S
            self._router.wait(TICK_S)
            self._forget_wakes()
            for _ in range(MESSAGES_PER_TICK):
                if (received := self._router.receive()) is None:
                    break
                peer, frames = received
                if isinstance(self._protocol.read(frames), Bye):
                    self._protocol.forget(peer, "left")

    def _serve(self) -> None:
        """Answers the messages that wait; an actor counts as silent only once all of them have been read."""
        self._forget_wakes()
        drained = False
        for _ in range(MESSAGES_PER_TICK):
            received = self._router.receive()
            drained = received is None
            if received is None:
                break
            peer, frames = received
            message = self._protocol.read(frames)
            with self._changed:
                self._protocol.answer(peer, message, frames)
        with self._changed:
            self._protocol.tick(drained)
            self._changed.notify_all()

    def _forget_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receive.recv(4096)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: there is nothing to wake
            self._wake_send.send(b"\0")


def check_address(address: str) -> None:
    """ValueError when another learner, or anything else, listens there."""
    Router(address).close()
