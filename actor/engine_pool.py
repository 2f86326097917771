"""A pool of engines: an episode plays on one of them, and continues on another one if that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from shared.engine.engine_api import EngineClient, EngineError, NewestVersion
from shared.log import get_logger
from shared.spans import span
from shared.types import Completion, Image, Sampling
from shared.util.refusals import Refusals

log = get_logger("actor")
WRONG_REQUEST = frozenset({400, 413, 422})  # status codes of a request that every engine would refuse
# A suspect engine is polled for this long; then the reason why it is not ready is logged, and polling starts again.
REVIVE_S = 30.0
SHORT_POLL_S = 2.0
MAX_POLLS = 64  # engines that are polled at once
MAX_PAUSE_S = 60.0
PATIENCE_S = 300.0  # longer than an engine takes to start again; who waits keeps the ticket


class EnginePool:
    """A pool of engines. A new episode goes to the engine with the fewest episodes, and stays there for its prefix
    cache. An engine whose last request failed (a suspect) gets no episode until it generates a token with weights of
    this run; when it fails again and again, it is asked for that after growing pauses. If no engine is healthy, an
    episode waits up to `patience_s` for one, so that a dead engine costs time instead of many failed episodes.
    `turn_tries`: how often one turn is requested at most.
    """

    def __init__(self, clients: Sequence[EngineClient], *, patience_s: float = PATIENCE_S, turn_tries: int = 3) -> None:
        self.clients = tuple(clients)
        self.newest = NewestVersion()
        self._polls = asyncio.Semaphore(MAX_POLLS)
        self.turn_tries = turn_tries
        self._patience_s = patience_s
        self.refusals = Refusals("an answer", log)
        self._revivals: dict[EngineClient, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # wakes the episodes that wait for an engine

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[EngineLease]:
        """Lease an engine to one episode. Raise EngineError if no engine becomes healthy in time."""
        lease = EngineLease(self, await self.choose())
        try:
            yield lease
        finally:
            lease.client.num_open -= 1

    async def choose(self, failed: EngineClient | None = None) -> EngineClient:
        """Return the healthy engine with the fewest episodes, and count one more episode there; choose the engine that
        `failed` only if no other is healthy. Raise EngineError if none is healthy within `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        while not (healthy := [client for client in self.clients if not client.suspect]):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self.no_engine_error(failed)
            self._revive_suspects()
            # not wait_for, which can lose a cancellation that arrives with the event
            with span("wait for an engine"), suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        self._revive_suspects()
        client = min(healthy, key=lambda c: (c is failed, c.num_open))
        client.num_open += 1
        client.newest = self.newest
        return client

    def no_engine_error(self, failed: EngineClient | None) -> EngineError:
        """Return the error that says why an episode has no engine."""
        reason = f"not healthy, or without this run's weights, for {self._patience_s:g} s"
        return EngineError((failed or self.clients[0]).url, reason)

    def wake_waiting(self) -> None:
        """Let the episodes that wait for an engine check again."""
        self._changed.set()
        self._changed.clear()

    def _revive_suspects(self) -> None:
        for client in self.clients:
            if client.suspect and client not in self._revivals:
                self._revivals[client] = asyncio.create_task(self._revive(client))

    async def _revive(self, client: EngineClient) -> None:
        """Poll a suspect engine until it is ready again, at most for the shorter of `REVIVE_S` and `patience_s`, or a
        short time if many are waiting to be polled; then wake the waiting episodes, which start the next poll if
        needed. From its second failure in a row on, the engine is left alone for a while first."""
        try:
            if client.num_failures > 1:
                pause_s = min(MAX_PAUSE_S, 2.0 ** min(client.num_failures - 2, 10))
                words = f"{client.num_failures} failures in a row; it is left alone for {pause_s:g} s"
                self.refusals.add(client.url, "fails_again", words)
                await asyncio.sleep(pause_s)
            async with self._polls:
                many = len(self._revivals) > MAX_POLLS
                await client.wait_ready(min(SHORT_POLL_S if many else REVIVE_S, self._patience_s))
        except EngineError as error:
            self.refusals.add(client.url, "not_ready", error.reason)
            client.num_failures += 1
        finally:
            self._revivals.pop(client, None)
            self.wake_waiting()

    async def close(self) -> None:
        for task in [*self._revivals.values()]:
            task.cancel()
        for client in self.clients:
            await client.close()


class EngineLease:
    """The engine that an episode plays on. It changes only when that engine fails. `retries` counts how often a turn
    was requested again."""

    def __init__(self, pool: EnginePool, client: EngineClient) -> None:
        self.client = client
        self.retries = 0
        self._pool = pool
        self.cache_key = ""  # default for requests; keeps caches of older weights apart

    @property
    def url(self) -> str:
        return self.client.url

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[Image], sampling: Sampling, **settings: Any
    ) -> Completion:
        """Generate a turn, as `EngineClient.generate` does. If an engine fails or aborts, request the turn again from
        the same tokens, up to `turn_tries` times in all, on another engine if one is healthy. If the last try fails,
        too, raise its EngineError or return its aborted Completion."""
        settings.setdefault("cache_key", self.cache_key)
        for left in reversed(range(self._pool.turn_tries)):
            try:
                completion = await self.client.generate(token_ids, images, sampling, **settings)
                if completion.finish_reason != "abort" or not left:
                    return completion
                word, reason = "aborted", f"{self.url} aborted the request"
            except EngineError as error:
                if not left or error.status in WRONG_REQUEST:
                    raise
                word, reason = f"status_{error.status}" if error.status else "no_answer", str(error)
            self._pool.refusals.add(
                self.url, word, f"a turn is asked for again, of another engine if one is well: {reason}"
            )
            self.retries += 1
            failed = self.client
            self.client = await self._pool.choose(failed)
            failed.num_open -= 1
        raise AssertionError
