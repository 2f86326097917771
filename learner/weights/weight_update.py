"""One pass of a publication over the engines: pause, begin, buckets, end, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from learner.weights.engine_link import EngineLink
from learner.weights.gathering import Bucket
from learner.weights.weight_group import EnginesFailed, Members, WeightGroupManager
from shared.engine.engine_api import EngineClient, bucket_content, each, reasons
from shared.engine.engine_messages import UNTRAINED
from shared.spans import span

Item = TypeVar("Item")
# Tries to begin an update. After each, fewer engines are left; the other ranks wait for the next bucket meanwhile.
TRIES = 3
SPANS = {"gather": "gather", "proof": "verify"}  # phases of the learner's own thread


class PhaseSeconds(dict[str, float]):
    """Seconds that each phase of a publication took, by the phase's name."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(("gather", "broadcast", "load", "pause", "proof"), 0.0))

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds spent in this context to a phase."""
        started = time.monotonic()
        try:
            with span(SPANS[name]) if name in SPANS else nullcontext():
                yield
        finally:
            self[name] += time.monotonic() - started

    def measure_each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items; add the seconds that making them takes to a phase."""
        while True:
            with self.measure(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


class WeightUpdate:
    """One pass: `begin`, then `send` for each bucket, then `end`. `failed`: URL -> reason of each failure; a failed
    engine resumes generation.

    An engine that fails at the beginning or at the end is left out, and the others go on. After a failure in between,
    nothing more is sent, since nobody knows which engines received everything so far; the others stay `paused` for
    another pass.

    An engine that can receive during generation is not paused: it installs the whole update between two of its steps.
    Any other engine overwrites its weights bucket by bucket. Until it has all of them, its weights have no version
    name: if it is left behind in the middle, it holds a mixture that neither the old nor the new name describes.
    """

    def __init__(
        self,
        link: EngineLink,
        manager: WeightGroupManager,
        members: Members,
        name: str,
        seconds: PhaseSeconds,
        pause_mode: str,
        call_timeout_s: float,
        paused: dict[EngineClient, float],
        distrusted: Collection[str] = (),
    ) -> None:
        """Prepare a pass. `paused`: engines and since when they are paused; all passes of a publication share it.
        `distrusted`: URLs of engines that get the weights without their name, so that nothing that they sample
        counts."""
        self._link = link
        self._manager = manager
        self._members = dict(members)
        self._name = name
        self._seconds = seconds
        self._pause_mode = pause_mode
        self._call_timeout_s = call_timeout_s
        self._paused = paused
        self._distrusted = distrusted
        self.failed: dict[str, str] = {}
        self.working = True
        self.num_bytes = 0
        self._begun = False
        self._renamed = set[EngineClient]()

    async def begin(self) -> None:
        """Pause the engines that need it and open the update on all; leave out those that fail."""
        for _ in range(TRIES):
            try:
                return await self._begin()
            except EnginesFailed as error:
                self._leave_out(error)
            if not self._members:
                break
        self.working = False

    async def _begin(self) -> None:
        limit, members = self._call_timeout_s, self._members
        await self._manager.group_of(members)
        self._begun = True
        in_place = self._pause_mode == "in_place"
        to_pause = [engine for engine, info in members.items() if not (in_place and info.beside_generation)]
        for engine in to_pause:
            self._paused.setdefault(engine, time.monotonic())
        await self._all(to_pause, lambda engine: engine.pause(self._pause_mode, limit))
        to_rename = [engine for engine, info in members.items() if not info.beside_generation]
        renamed = await self._all(to_rename, lambda engine: engine.rename_weights(UNTRAINED, limit))
        self._renamed = {engine for engine in renamed if renamed[engine]}
        await self._all(members, lambda engine: engine.begin_update(limit, self._update_name(engine)))

    async def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when it has arrived or an engine has failed."""
        self.num_bytes += bucket.flat.numel()
        started = time.monotonic()
        try:
            group = await self._manager.group_of(self._members)
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": group.name,
                "flush_cache": self._pause_mode == "retract",
            }
            names = {engine: tuple(self._names(engine, bucket).items()) for engine in self._members}
            # Engines with the same fields share one encoding.
            encoded = {fields: bucket_content(body | dict(fields)) for fields in set(names.values())}
            contents = {engine: encoded[fields] for engine, fields in names.items()}
            sent_s = await self._manager.send(bucket.flat, contents)
            self._seconds["broadcast"] += sent_s
            self._seconds["load"] += time.monotonic() - started - sent_s
        except EnginesFailed as error:
            self.failed |= error.reasons
            self.working = False

    async def end(self, in_flight: Future[None] | None = None) -> None:
        """Install the update if all of it has arrived, otherwise discard it; tell the engines to resume.

        `in_flight`: the sending of the last bucket, if nobody has waited for it yet.
        """
        if in_flight:
            await asyncio.wrap_future(in_flight)
        limit = self._call_timeout_s
        if self.working:
            with self._seconds.measure("load"):
                await self._each(
                    lambda engine: engine.end_update(self._name_for(engine), limit, self._update_name(engine))
                )
                await self._each(lambda engine: engine.rename_weights(self._name_for(engine), limit), self._renamed)
        elif self._begun:
            await each(self._members, lambda engine: engine.end_update(None, limit, self._update_name(engine)))
        over = {engine for engine in self._paused if self.working or engine.url in self.failed}
        answers = await each(over, lambda engine: self._link.resume(engine, limit))
        self._leave_out(EnginesFailed(reasons(answers)))
        if over:
            now = time.monotonic()
            self._seconds["pause"] = max(self._seconds["pause"], *(now - self._paused.pop(engine) for engine in over))

    async def _each(
        self, call: Callable[[EngineClient], Awaitable[object]], some: Collection[EngineClient] | None = None
    ) -> None:
        """Call all engines, or `some` of them, concurrently; leave out those that fail."""
        engines = [engine for engine in self._members if some is None or engine in some]
        self._leave_out(EnginesFailed(reasons(await each(engines, call))))

    def _leave_out(self, error: EnginesFailed) -> None:
        self.failed |= {url: reason for url, reason in error.reasons.items() if url not in self.failed}
        self._members = {engine: info for engine, info in self._members.items() if engine.url not in self.failed}

    def _update_name(self, engine: EngineClient) -> str:
        """Return the name of this update for the engine, by which it refuses late buckets of another update; empty if
        the engine does not support names."""
        return self._name if self._members[engine].names_updates else ""

    def _name_for(self, engine: EngineClient) -> str:
        """Return the name under which the engine is to hold the new weights."""
        return UNTRAINED if engine.url in self._distrusted else self._name

    def _names(self, engine: EngineClient, bucket: Bucket) -> dict[str, Any]:
        """Return the fields of a bucket that depend on the engine: the update's name, and with the last bucket the new
        version. An engine whose weights were renamed meanwhile gets the version at the end instead."""
        version = {"weight_version": self._name_for(engine)} if bucket.last and engine not in self._renamed else {}
        return version | ({"update": update} if (update := self._update_name(engine)) else {})

    async def _all(
        self, engines: Iterable[EngineClient], call: Callable[[EngineClient], Awaitable[object]]
    ) -> dict[EngineClient, object]:
        """Call all engines concurrently, so that a failure does not delay the others; raise EnginesFailed with those
        that fail."""
        answers = await each(engines, call)
        if failed := reasons(answers):
            raise EnginesFailed(failed)
        return answers
