"""One pass's conversation with the engines: pause, begin, buckets, end, continue."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from learner.weights.buckets import Bucket
from learner.weights.group import EnginesFailed, Members, WeightGroupManager
from shared.engine_api import EngineClient, each, reasons


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


class WeightUpdate:
    """Begin, then one bucket after the other, then end. After a failure it sends no more; `end` always continues
    generation. `failed` holds who failed, and why.

    An engine that receives beside generation is not paused: it installs the whole update between two of its steps.
    """

    def __init__(
        self,
        manager: WeightGroupManager,
        members: Members,
        name: str,
        seconds: Seconds,
        pause_mode: str,
        call_timeout_s: float,
    ) -> None:
        self._manager, self._members, self._name = manager, members, name
        self._pause_mode, self._call_timeout_s, self._seconds = pause_mode, call_timeout_s, seconds
        self.failed: dict[str, str] = {}
        self.working, self.num_bytes = True, 0
        in_place = pause_mode == "in_place"
        self._to_pause = [engine for engine, traits in members.items() if not (in_place and traits.beside_generation)]
        self._paused_at = 0.0

    async def begin(self) -> None:
        limit = self._call_timeout_s
        with self._noting():
            await self._manager.group_of(self._members)
            self._paused_at = time.monotonic()
            await self._all(self._to_pause, lambda engine: engine.pause(self._pause_mode, limit))
            await self._all(self._members, lambda engine: engine.begin_update(limit, self._update(engine)))

    async def send(self, bucket: Bucket) -> None:
        """Returns when the bucket has arrived, or an engine has failed."""
        self.num_bytes += bucket.flat.numel()
        with self._noting():
            group = await self._manager.group_of(self._members)
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": group.name,
                "flush_cache": self._pause_mode == "retract",
            }
            if bucket.last:
                body["weight_version"] = self._name
            limit, sent = self._manager.call_timeout_s, 0.0
            started = time.monotonic()

            def broadcast() -> None:
                nonlocal sent
                group.broadcast(bucket.flat)
                sent = time.monotonic() - started

            calls = {engine: engine.receive(self._named(body, engine), limit) for engine in self._members}
            await self._manager.together("send weights", calls, broadcast)
            self._seconds["broadcast"] += sent
            self._seconds["load"] += time.monotonic() - started - sent

    async def end(self) -> None:
        if self._paused_at == 0.0:  # the group did not come about
            return
        limit = self._call_timeout_s
        with self._noting(), self._seconds.of("load"):
            if self.working:
                await self._all(
                    self._members, lambda engine: engine.end_update(self._name, limit, self._update(engine))
                )
            else:
                await each(self._members, lambda engine: engine.end_update(None, limit, self._update(engine)))
        with self._noting():
            await self._all(self._to_pause, lambda engine: engine.resume(limit))
        if self._to_pause:
            self._seconds["pause"] += time.monotonic() - self._paused_at

    def _update(self, engine: EngineClient) -> str:
        """What the engine is told that this update is called: so it takes nothing of another one, late though it be."""
        return self._name if self._members[engine].names_updates else ""

    def _named(self, body: dict[str, Any], engine: EngineClient) -> dict[str, Any]:
        return body | {"update": update} if (update := self._update(engine)) else body

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except EnginesFailed as error:
            self.failed |= {url: reason for url, reason in error.reasons.items() if url not in self.failed}
            self.working = False

    async def _all(self, engines: Iterable[EngineClient], call: Callable[[EngineClient], Awaitable[None]]) -> None:
        """The same call to all at once: EnginesFailed names each that fails, the others are not held up."""
        if failed := reasons(await each(engines, call)):
            raise EnginesFailed(failed)
