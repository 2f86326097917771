"""The learner's ticket server, on rank 0: issues tickets to actors, accepts their groups, and keeps them until their
step.

One thread owns the endpoint. It receives Hello, Request, Group and Bye; it sends Welcome, Tickets, Receipt, Ack,
Cancel, Refusal and Stop. It waits for messages and for the learner's thread, which wakes it by `open`, `set_version`,
`commit`, `start_evaluation` or `stop`. The learner's thread waits in `next_batch` and `evaluation_result`, and this
thread wakes it when groups have come. The number of tickets that may be open at once bounds the memory of the groups
here, whatever actors send.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from learner.tickets.protocol import TicketProtocol, TicketServerSettings
from learner.tickets.sources import SampleSource
from learner.tickets.staleness import StalenessMeter
from learner.tickets.ticket_book import BookSettings, EvaluationResult, TicketBook
from shared.log import get_logger
from shared.types import Bye, Group, PolicyVersion, Sample, Sampling, Stop, Ticket
from shared.wire.transports import listen

__all__ = ["Interrupted", "TicketServer", "TicketServerSettings"]
Batch = list[tuple[Ticket, Group]]
Result = TypeVar("Result")
TICK_S = 0.2
STOP_LIMIT_S = 2.0
MESSAGES_PER_TICK = 256
POLL_S = 0.5
LOG_EVERY_S = 30.0
ON_WAIT_S = 60.0  # between two calls of `on_wait`


class Interrupted(Exception):
    """An event interrupted a wait for groups or results."""


class TicketServer:
    """Listens from its construction on and issues tickets from `open` on. Only the learner's thread may call its
    methods.

    The constructor raises ValueError if the address cannot be used.
    """

    def __init__(self, source: SampleSource, book: BookSettings, settings: TicketServerSettings) -> None:
        self._log = get_logger("tickets")
        self._endpoint = listen(settings.address, settings.endpoint, settings.keys)
        self.address = self._endpoint.address
        self._changed = threading.Condition()  # guards the book and the protocol
        self._book = TicketBook(source, book, nonce=os.urandom(4).hex())
        self._protocol = TicketProtocol(self._endpoint, self._book, settings)
        self._staleness = StalenessMeter()
        self._stale = 0  # total of stale groups at the last call of `metrics`
        self._stop: Stop | None = None
        self._silent = False
        self._failure: BaseException | None = None
        # Told by waits of the learner's thread: (evaluation, finished tickets, all tickets).
        self.on_evaluation: Callable[[str, int, int], None] = lambda name, done, total: None
        self._thread = threading.Thread(target=self._run, name="tickets", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- the learner's side

    def open(self, version: PolicyVersion | None = None) -> None:
        """Issue tickets from now on: the engines have weights (of `version`)."""
        with self._changed:
            if version is not None:
                self._book.version = version
            self._protocol.issuing = True
        self._endpoint.wake()

    def set_version(self, version: PolicyVersion) -> None:
        """Issue the tickets that `version` allows: the engines have its weights."""
        with self._changed:
            self._book.version = version
        self._endpoint.wake()

    def refuse_engine(self, url: str, first: PolicyVersion, last: PolicyVersion) -> None:
        """Refuse what the engine at `url` may have sampled as versions `first` to `last`: its weights were wrong."""
        with self._changed:
            dropped = self._protocol.refuse_engine(url, first, last)
        if dropped:
            self._log.warning("dropped %d groups that engine %s may have sampled with wrong weights", dropped, url)
        self._endpoint.wake()

    def next_batch(self, num_groups: int, timeout_s: float, *interrupts: threading.Event) -> Batch:
        """Wait for `num_groups` groups and return the oldest ones. They count as trained; call `commit` when their step
        is done.

        Raise TimeoutError, which names the actors it waited for; Interrupted if one of `interrupts` was set.
        """
        what = f"no batch of {num_groups} groups"
        batch = self._wait(lambda: self._book.take_groups(num_groups), timeout_s, what, *interrupts)
        with self._changed:
            for ticket, group, sender in self._book.take_stale():
                self._protocol.selection.add("dropped", ticket, group)
                self._protocol.blame(sender, "stale: tokens older than learner.max_staleness", lasting=False)
            for ticket, group in batch:
                self._protocol.selection.add("trained", ticket, group)
            self._staleness.add([group for _, group in batch], self._book.version)
        self._endpoint.wake()  # dropping a stale group makes room for a new ticket
        return batch

    def commit(self) -> None:
        """Tell the actors of the last batch that they may forget its groups: the step on it is done."""
        with self._changed:
            self._book.commit()
        self._endpoint.wake()

    def start_evaluation(self, name: str, samples: Sequence[Sample], sampling: Sampling, group_size: int = 1) -> None:
        """Queue one ticket for each sample before all training tickets. Raise ValueError if the name is in use."""
        with self._changed:
            self._book.evaluations.start(name, samples, sampling, group_size, self._book.version)
        self._endpoint.wake()

    def evaluation_result(self, name: str, timeout_s: float, *interrupts: threading.Event) -> EvaluationResult:
        """Wait for all tickets of an evaluation; return its result and forget it. Raise what `next_batch` raises."""
        with self._changed:
            result = self._book.evaluations.result(name)
        if result is not None:  # complete before any interrupt
            return result
        what = f"no result of evaluation {name!r}"
        return self._wait(lambda: self._book.evaluations.result(name), timeout_s, what, *interrupts)

    def evaluation_left(self, name: str) -> int:
        """Return how many tickets of a running evaluation are still open."""
        with self._changed:
            return self._book.evaluations.left(name)

    def engines(self) -> frozenset[str]:
        """Return the URLs of the connected actors' engines."""
        with self._changed:
            return self._protocol.engines()

    def describe_wait(self) -> str:
        """Return one line: what has arrived, what is missing, and which actors the learner waits for."""
        with self._changed:
            return self._protocol.describe_wait(self.address)

    @property
    def max_staleness_seen(self) -> int:
        """The largest staleness, in versions, of any group that was trained on."""
        return self._staleness.max_seen

    @property
    def process_id(self) -> str:
        return self._book.nonce

    def is_process(self, process: str) -> bool:
        """Tell whether a process is an earlier one of this run, as far as its checkpoint knows them."""
        with self._changed:
            return self._book.is_process(process)

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values, consistent with the batches that `next_batch` has returned."""
        with self._changed:
            return self._book.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a value of `state_dict`. Call it before `open`."""
        with self._changed:
            self._book.load_state(state)
            self._stale = self._book.dropped["stale"]
            if self._book.held_back:
                self._log.warning(
                    "learner.max_staleness = %d admits fewer open tickets than the checkpoint has: %d are played anew",
                    self._book.settings.max_staleness,
                    len(self._book.held_back),
                )

    def metrics(self) -> dict[str, float]:
        """Return counters since the run began, and distributions since the last call."""
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
                "tickets/retried": book.retried.total(),
                "wire/rejected": self._protocol.rejects.counts.total(),
                "actors/known": len(actors),
                "actors/paused": self._protocol.health.num_paused,
            }
            # actors without slots only report their host's engines
            idle = [actor.idle_frac for actor in actors if actor.slots]
            if idle:
                values["actors/idle_frac"] = sum(idle) / len(idle)
            values |= {f"tickets/dropped/{reason}": n for reason, n in book.dropped.items()}
            values |= {f"tickets/retried/{reason}": n for reason, n in book.retried.items()}
            values |= {f"tickets/refused/{reason}": n for reason, n in book.refused.items()}
            values |= {f"wire/refused_connections/{reason}": n for reason, n in self._endpoint.refused.items()}
            values |= {f"wire/rejected/{reason}": n for reason, n in self._protocol.rejects.counts.items()}
            values |= book.pooled.metrics() if book.pooled is not None else {}
            values["tickets/stale"], self._stale = book.dropped["stale"] - self._stale, book.dropped["stale"]
            return (
                values | self._protocol.selection.metrics() | self._protocol.endings.drain() | self._staleness.drain()
            )

    def take_failed(self) -> list[tuple[Ticket, Group, str]]:
        """Return (ticket, group, reason) of the latest groups without any sound episode since the last call."""
        with self._changed:
            failed = list(self._protocol.failed)
            self._protocol.failed.clear()
            return failed

    def trace(self, *, new: bool, kept: bool) -> None:
        """Say whether the tickets that are issued from now on are traced, and whether spans that come are kept."""
        with self._changed:
            self._protocol.traces_new, self._protocol.traces_kept = new, kept

    def take_traces(self) -> list[tuple[str, bytes]]:
        """Return (actor, spans of a group) for the groups that have come since the last call."""
        with self._changed:
            traces = list(self._protocol.traces)
            self._protocol.traces.clear()
            return traces

    def selection_table(self) -> str:
        """Return a Markdown table that compares the trained episodes with the issued ones."""
        with self._changed:
            return self._protocol.selection.table()

    def go_silently(self) -> None:
        """Close the endpoint without a Stop: actors keep their groups and wait for another learner process."""
        with self._changed:
            self._silent = True
        self.stop("the learner shuts down")

    def stop(self, reason: str, *, failed: bool = False) -> None:
        """Tell all actors that the run is over, `failed` or not, and close the endpoint. May be called again."""
        with self._changed:
            self._stop = self._stop or Stop(reason, failed)
            self._changed.notify_all()
        self._endpoint.wake()
        self._thread.join(5.0)

    def _wait(
        self, poll: Callable[[], Result | None], timeout_s: float, what: str, *interrupts: threading.Event
    ) -> Result:
        """Return the first result of `poll` that is not None. Raise what `next_batch` raises, or RuntimeError if the
        thread has ended."""
        started = logged = time.monotonic()
        logged_progress = None
        with self._changed:
            while True:
                if any(event.is_set() for event in interrupts):
                    raise Interrupted
                if self._failure is not None:
                    raise RuntimeError(f"the ticket server stopped: {self._failure}") from self._failure
                if self._stop is not None:
                    raise RuntimeError(f"the ticket server is stopped: {self._stop.reason}")
                self._protocol.check_failures()
                result = poll()
                if result is not None:
                    return result
                now = time.monotonic()
                if now - started >= timeout_s:
                    raise TimeoutError(f"{what} within {timeout_s:g} s: {self._protocol.describe_wait(self.address)}")
                if progress := self._book.evaluations.progress():
                    self.on_evaluation(*progress)
                if now - logged >= LOG_EVERY_S:
                    logged = now
                    if progress not in (None, logged_progress):
                        logged_progress = progress
                        self._log.info("evaluation %s: %d of %d samples", *progress)
                        continue
                    self._log.info(
                        "%s since %.0f s: %s", what, now - started, self._protocol.describe_wait(self.address)
                    )
                self._changed.wait(min(POLL_S, started + timeout_s - now))

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while self._stop is None:
                self._endpoint.wait(TICK_S)
                self._serve()
        except BaseException as error:  # noqa: BLE001 - the learner's thread raises it, see _wait
            self._failure = error
        finally:
            with self._changed:
                self._changed.notify_all()
                # the learner decides by then whether to send a Stop
                self._changed.wait_for(lambda: self._stop is not None)
            if not self._silent and self._stop is not None:
                self._send_stop(self._stop)
            self._endpoint.close()

    def _send_stop(self, stop: Stop) -> None:
        """Send Stop until all actors have said Bye or closed their connection; for `STOP_LIMIT_S` at most."""
        say_at = time.monotonic()
        deadline = say_at + STOP_LIMIT_S
        while self._protocol.actors and (now := time.monotonic()) < deadline:
            if now >= say_at:
                self._protocol.send_stop(stop)
                say_at = now + TICK_S
            self._endpoint.wait(TICK_S)
            for _ in range(MESSAGES_PER_TICK):
                if (received := self._endpoint.receive()) is None:
                    break
                peer, frames = received
                if isinstance(self._protocol.read(frames), Bye):
                    self._protocol.forget(peer, "left")

    def _serve(self) -> None:
        """Answer the waiting messages. An actor counts as silent only after all of them have been read."""
        drained = False
        for _ in range(MESSAGES_PER_TICK):
            received = self._endpoint.receive()
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


def wait_for_evaluation(
    server: TicketServer, name: str, limit_s: float, shutdown: threading.Event, on_wait: Callable[[], object]
) -> EvaluationResult:
    """Return an evaluation's result, however long it takes while tickets are completed; call `on_wait` now and then.

    Raise TimeoutError if no ticket is completed for `limit_s`, otherwise what `evaluation_result` raises.
    """
    left = -1
    since = time.monotonic()
    while True:
        try:
            return server.evaluation_result(name, min(limit_s, ON_WAIT_S), shutdown)
        except TimeoutError as error:
            before, left = left, server.evaluation_left(name)
            if left != before:
                since = time.monotonic()
            elif time.monotonic() - since >= limit_s:
                state = str(error).partition(": ")[2]
                raise TimeoutError(
                    f"evaluation {name!r} has brought nothing for {limit_s:g} s (learner.wait_timeout_s): {state}"
                ) from None
        on_wait()


def check_address(address: str) -> None:
    """Raise ValueError if a learner cannot listen at this address, for example because another process does."""
    listen(address).close()
