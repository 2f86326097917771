"""One pass's conversation with the engines: pause, begin, buckets, end, continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

from learner.weights.buckets import Bucket
from learner.weights.group import EnginesFailed, Members, WeightGroupManager
from shared.engine_api import EngineClient, EngineError, bucket_content, each, reasons
from shared.engine_messages import NO_WEIGHTS

Item = TypeVar("Item")
TRIES = 3  # to begin, after each of which fewer engines are left: the other ranks wait for the next bucket meanwhile
RESUME_TRIES = 3
RESUME_AGAIN_S = 0.25
STILL_PAUSED: WeakSet[EngineClient] = WeakSet()  # nobody knows that they go on; used on their clients' loop alone


async def resume(engine: EngineClient, limit_s: float) -> None:
    """Tells a paused engine to go on, some times if need be, all within `limit_s`. EngineError where it has not said
    that it does: it is `STILL_PAUSED` then."""
    STILL_PAUSED.add(engine)
    deadline, left_s = time.monotonic() + limit_s, limit_s
    for tries_left in reversed(range(RESUME_TRIES)):
        try:
            await engine.resume(left_s)
            break
        except EngineError:
            left_s = deadline - time.monotonic() - RESUME_AGAIN_S
            if not tries_left or left_s <= 0:
                raise
        await asyncio.sleep(RESUME_AGAIN_S)
    STILL_PAUSED.discard(engine)


class Seconds(dict[str, float]):
    """Seconds of a publication by name."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(("gather", "broadcast", "load", "pause", "proof"), 0.0))

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self[name] += time.monotonic() - started

    def of_each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """The items; the seconds are those in which they are made."""
        while True:
            with self.of(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


class WeightUpdate:
    """Begin, then one bucket after the other, then end. `failed`: who failed, and why; such an engine generates on.

    Whoever fails at the beginning or at the end is left out, and costs the others nothing. After a failure in between
    no more is sent: nobody knows who has all that was sent so far, and the others stay `paused` for another pass.

    An engine that receives beside generation is not paused: it installs the whole update between two of its steps. Any
    other writes each bucket over its weights. Until it has all of them it calls them by no version: it may be left
    behind in the middle, and would give a mixture an old or a new name.
    """

    def __init__(
        self,
        manager: WeightGroupManager,
        members: Members,
        name: str,
        seconds: Seconds,
        pause_mode: str,
        call_timeout_s: float,
        paused: dict[EngineClient, float],
    ) -> None:
        """`paused`: engines and since when; it is the publication's, for all of its passes."""
        self._manager, self._members, self._name, self._paused = manager, dict(members), name, paused
        self._pause_mode, self._call_timeout_s, self._seconds = pause_mode, call_timeout_s, seconds
        self.failed: dict[str, str] = {}
        self.working, self._begun, self.num_bytes = True, False, 0
        self._renamed = set[EngineClient]()

    async def begin(self) -> None:
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
        to_pause = [engine for engine, traits in members.items() if not (in_place and traits.beside_generation)]
        for engine in to_pause:
            self._paused.setdefault(engine, time.monotonic())
        await self._all(to_pause, lambda engine: engine.pause(self._pause_mode, limit))
        to_rename = [engine for engine, traits in members.items() if not traits.beside_generation]
        renamed = await self._all(to_rename, lambda engine: engine.rename_weights(NO_WEIGHTS, limit))
        self._renamed = {engine for engine in renamed if renamed[engine]}
        await self._all(members, lambda engine: engine.begin_update(limit, self._update(engine)))

    async def send(self, bucket: Bucket) -> None:
        """Returns when the bucket has arrived, or an engine has failed."""
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
            told = {engine: tuple(self._names(engine, bucket).items()) for engine in self._members}
            # Once for all engines that are told the same, and for companions, which are told nothing more.
            written = {names: bucket_content(body | dict(names)) for names in {(), *told.values()}}
            contents = {engine: written[names] for engine, names in told.items()}
            sent = await self._manager.send(bucket.flat, contents, written[()])
            self._seconds["broadcast"] += sent
            self._seconds["load"] += time.monotonic() - started - sent
        except EnginesFailed as error:
            self.failed |= error.reasons
            self.working = False

    async def end(self, in_flight: Future[None] | None = None) -> None:
        """`in_flight`: the last bucket, where nobody has waited for it yet."""
        if in_flight:
            await asyncio.wrap_future(in_flight)
        limit = self._call_timeout_s
        if self.working:
            with self._seconds.of("load"):
                await self._each(lambda engine: engine.end_update(self._name, limit, self._update(engine)))
                await self._each(lambda engine: engine.rename_weights(self._name, limit), self._renamed)
        elif self._begun:
            await each(self._members, lambda engine: engine.end_update(None, limit, self._update(engine)))
        over = {engine for engine in self._paused if self.working or engine.url in self.failed}
        answers = await each(over, lambda engine: resume(engine, limit))
        self._leave_out(EnginesFailed(reasons(answers)))
        if over:
            now = time.monotonic()
            self._seconds["pause"] = max(self._seconds["pause"], *(now - self._paused.pop(engine) for engine in over))

    async def _each(
        self, call: Callable[[EngineClient], Awaitable[object]], some: Collection[EngineClient] | None = None
    ) -> None:
        """The same call to all, or to `some` of them; whoever fails is left out."""
        engines = [engine for engine in self._members if some is None or engine in some]
        self._leave_out(EnginesFailed(reasons(await each(engines, call))))

    def _leave_out(self, error: EnginesFailed) -> None:
        self.failed |= {url: reason for url, reason in error.reasons.items() if url not in self.failed}
        self._members = {engine: t for engine, t in self._members.items() if engine.url not in self.failed}

    def _update(self, engine: EngineClient) -> str:
        """What the engine is told that this update is called: so it takes nothing of another one, late though it be."""
        return self._name if self._members[engine].names_updates else ""

    def _names(self, engine: EngineClient, bucket: Bucket) -> dict[str, Any]:
        """What a bucket says to this engine of the update, and the last one of the version that the weights then are;
        an engine that called them by no version meanwhile is told that at the end."""
        version = {"weight_version": self._name} if bucket.last and engine not in self._renamed else {}
        return version | ({"update": update} if (update := self._update(engine)) else {})

    async def _all(
        self, engines: Iterable[EngineClient], call: Callable[[EngineClient], Awaitable[object]]
    ) -> dict[EngineClient, object]:
        """The same call to all at once: EnginesFailed names each that fails, the others are not held up."""
        answers = await each(engines, call)
        if failed := reasons(answers):
            raise EnginesFailed(failed)
        return answers
