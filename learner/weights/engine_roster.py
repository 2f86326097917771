"""Which of the engines that actors name are asked to take weights: a publication waits for those that have answered,
and hardly for the others.

Engines that do not answer, or fail in an update, are tried again after pauses that grow with their failures in a row.
At most `PROBES` of them are asked at once, in the background, so that neither dead addresses nor their number slow a
step. All methods run on the loop of `EngineLink`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from shared.engine.engine_api import EngineClient, EngineError, each

PROBES = 64  # engines that have not answered last time, asked at once
WELL_PROBES = 256  # engines that have, asked at once
PROBE_S = 5.0  # time limit of a probe in the background
# While an engine is well, each of the `PROBES` takes this time or longer: thousands that refuse at once cost no step.
PROBE_EVERY_S = 1.0
NEWCOMER_S = 1.0  # how long a publication waits for engines that have never answered, if others are well
MAX_WAITS = 2  # publications that wait for an engine that does not answer
FREE_FAILURES = 2  # failures in a row of an engine that has answered before it is left alone for a while
MAX_PAUSE_S = 300.0
RETRY_S = 10.0  # longest pause while no engine is well
WAIT_STEP_S = 0.25


@dataclass(slots=True)
class EngineRecord:
    """One engine. `probe` is set while it is asked, or waits to be asked, in the background."""

    is_well: bool = False  # it answered when it was asked last
    has_answered: bool = False
    num_failures: int = 0  # in a row, answers that are followed by a failure in the update included
    failed_at: float = 0.0
    pause_s: float = 0.0
    num_waits: int = 0
    reason: str = "has not answered yet"
    probe: asyncio.Future[None] | None = None

    def is_due(self, now: float, longest_s: float) -> bool:
        """Tell whether the pause after its last failure is over; no pause counts as longer than `longest_s`."""
        return now >= self.failed_at + min(self.pause_s, longest_s)

    def fail(self, reason: str, *, well: bool) -> None:
        """Record a failure, and whether the engine answers all the same."""
        self.is_well = well
        self.num_failures += 1
        self.reason = reason
        self.failed_at = time.monotonic()
        excess = self.num_failures - (FREE_FAILURES if self.has_answered else 0)
        self.pause_s = min(MAX_PAUSE_S, 2.0 ** min(excess - 1, 20)) if excess > 0 else 0.0


class EngineRoster:
    """The named engines and what is known of them."""

    def __init__(self, client: Callable[[str], EngineClient], forget: Callable[[str], None]) -> None:
        """Start without engines. `client` returns the client of a URL or raises EngineError; `forget` frees the
        client of a URL that does not answer."""
        self._client = client
        self._forget = forget
        self._records: dict[str, EngineRecord] = {}
        self._queue: deque[str] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._num_working = 0
        self._found_at = 0.0  # when `find` was called last

    async def find(self, urls: Collection[str], limit_s: float) -> tuple[list[str], dict[str, str]]:
        """Return the engines that answer now, and URL -> reason of the others. An engine that has answered has
        `limit_s`; others have that if none is well, else `NEWCOMER_S`."""
        names = {url.rstrip("/") for url in urls}
        self._prune(names)
        records = {url: self._records.setdefault(url, EngineRecord()) for url in sorted(names)}
        now = self._found_at = time.monotonic()
        someone_is_well = any(record.is_well and not record.pause_s for record in records.values())
        longest_s = MAX_PAUSE_S if someone_is_well else RETRY_S
        due = [url for url, record in records.items() if record.is_due(now, longest_s)]
        well = [url for url in due if records[url].is_well]
        self._ask_in_background([url for url in due if not records[url].is_well])
        waiting = [record for record in records.values() if record.probe is not None and record.num_waits < MAX_WAITS]
        answers = await each(well, lambda url: self._client(url).health(limit_s), at_once=WELL_PROBES)
        for url, answer in answers.items():
            if isinstance(answer, EngineError):
                records[url].fail(answer.reason, well=False)
        await self._wait(records, waiting, limit_s - (time.monotonic() - now))
        ready = [url for url in due if records[url].is_well]
        return ready, {url: _why(record) for url, record in records.items() if url not in set(ready)}

    def record_failure(self, url: str, reason: str) -> None:
        """Record that an engine that answers did not take weights."""
        if record := self._records.get(url):
            record.fail(reason, well=True)

    def record_success(self, url: str) -> None:
        """Record that an engine has taken weights."""
        if record := self._records.get(url):
            record.num_failures, record.pause_s = 0, 0.0

    def has_failed_now(self, url: str) -> bool:
        """Tell whether an engine that has answered before failed when it was asked last, a moment ago."""
        record = self._records.get(url)
        return record is not None and record.has_answered and record.failed_at >= self._found_at

    def close(self) -> None:
        """Ask nobody any more."""
        for worker in self._workers:
            worker.cancel()

    def _prune(self, names: Collection[str]) -> None:
        for url in [url for url in self._records if url not in names]:
            record = self._records.pop(url)
            if record.probe is not None and not record.probe.done():
                record.probe.set_result(None)
            if not record.has_answered:
                self._forget(url)

    async def _wait(self, records: dict[str, EngineRecord], waiting: list[EngineRecord], limit_s: float) -> None:
        """Wait for the answers of engines that are asked in the background."""
        began, limit_s = time.monotonic(), max(limit_s, 0.0)
        probes = {record.probe: record for record in waiting if record.probe is not None}
        for record in waiting:
            record.num_waits += 1
        while pending := {probe for probe in probes if not probe.done()}:
            someone_is_well = any(record.is_well for record in records.values())
            others = someone_is_well and not any(probes[probe].has_answered for probe in pending)
            left_s = min(limit_s, NEWCOMER_S if others else limit_s) - (time.monotonic() - began)
            if left_s <= 0:
                return
            await asyncio.wait(pending, timeout=min(left_s, WAIT_STEP_S))

    def _ask_in_background(self, urls: list[str]) -> None:
        new = [url for url in urls if self._records[url].probe is None]
        random.shuffle(new)  # so that one member's dead addresses do not always come before another's engines
        for url in sorted(new, key=lambda url: not self._records[url].has_answered):
            self._records[url].probe = asyncio.get_running_loop().create_future()
            self._queue.append(url)
        for _ in range(min(PROBES - self._num_working, len(self._queue))):
            self._num_working += 1
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        try:
            while self._queue:
                began = time.monotonic()
                await self._probe(self._queue.popleft())
                if self._queue and any(record.is_well for record in self._records.values()):
                    await asyncio.sleep(PROBE_EVERY_S - (time.monotonic() - began))
        finally:
            self._num_working -= 1

    async def _probe(self, url: str) -> None:
        record = self._records.get(url)
        if record is None or record.probe is None:
            return  # named no more
        try:
            await self._client(url).health(PROBE_S)
            record.is_well, record.has_answered, record.num_waits = True, True, 0
            record.pause_s = 0.0
        except EngineError as error:
            record.fail(error.reason, well=False)
            if not record.has_answered:
                self._forget(url)
        finally:
            if not record.probe.done():
                record.probe.set_result(None)
            record.probe = None


def _why(record: EngineRecord) -> str:
    left_s = record.failed_at + record.pause_s - time.monotonic()
    return record.reason + (f" (asked again in {left_s:.0f} s)" if left_s >= 1 else "")
