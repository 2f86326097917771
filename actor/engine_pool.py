"""Several engines as one: an episode plays on one of them, and goes on at another one when that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from shared.engine_api import EngineClient, EngineError
from shared.guards.refusals import Refusals
from shared.log import get_logger
from shared.types import Completion, Image, Sampling

log = get_logger("actor")
WRONG_REQUEST = frozenset({400, 413, 422})  # every engine would refuse it
REVIVE_S = 30.0  # a suspect engine is asked for so long; then why it is not ready is said, and it is asked anew


class EnginePool:
    """Several engines: a new episode goes to the one with the fewest, and stays there for its prefix cache.

    An engine whose last request failed gets no episode until it answers again with weights of this run; if no other
    is well, an episode waits up to `patience_s` for one, so that a dead engine costs time and not a flood of failed
    episodes. `turn_tries`: how often one turn is asked for at most.
    """

    def __init__(self, clients: Sequence[EngineClient], *, patience_s: float = 30.0, turn_tries: int = 3) -> None:
        self.clients, self.turn_tries, self._patience_s = tuple(clients), turn_tries, patience_s
        self.refusals = Refusals("an answer", log)
        self._revivals: dict[EngineClient, asyncio.Task[None]] = {}
        self._news = asyncio.Event()  # of engines: wakes those that wait for one

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Seat]:
        """The place of one episode. EngineError if all engines stay away."""
        seat = Seat(self, await self.place())
        try:
            yield seat
        finally:
            seat.client.num_open -= 1

    async def place(self, failed: EngineClient | None = None) -> EngineClient:
        """The engine that is well and has the fewest episodes, with one more from now on; the one that `failed` only if
        no other is well. EngineError if none is within `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        while not (well := [client for client in self.clients if not client.suspect]):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self.nobody(failed)
            self._revive_suspects()
            with suppress(TimeoutError):  # wait_for swallows a cancellation that comes with the news
                async with asyncio.timeout(left_s):
                    await self._news.wait()
        self._revive_suspects()
        client = min(well, key=lambda c: (c is failed, c.num_open))
        client.num_open += 1
        return client

    def nobody(self, failed: EngineClient | None) -> EngineError:
        """Why an episode has no engine."""
        reason = f"not healthy, or without this run's weights, for {self._patience_s:g} s"
        return EngineError((failed or self.clients[0]).url, reason)

    def tell(self) -> None:
        """Those that wait for an engine look again."""
        self._news.set()
        self._news.clear()

    def _revive_suspects(self) -> None:
        for client in self.clients:
            if client.suspect and client not in self._revivals:
                self._revivals[client] = asyncio.create_task(self._revive(client))

    async def _revive(self, client: EngineClient) -> None:
        """Asks a suspect engine until it is ready again, for `REVIVE_S` or `patience_s`; who waits then asks anew."""
        try:
            await client.wait_ready(min(REVIVE_S, self._patience_s))
        except EngineError as error:
            self.refusals.add(client.url, "not_ready", error.reason)
        finally:
            self._revivals.pop(client, None)
            self.tell()

    async def close(self) -> None:
        for task in [*self._revivals.values()]:
            task.cancel()
        for client in self.clients:
            await client.close()


class Seat:
    """An episode's place at an engine. It changes only when that engine fails: `retries` says how often it asked again
    for a turn."""

    def __init__(self, pool: EnginePool, client: EngineClient) -> None:
        self._pool, self.client, self.retries = pool, client, 0
        self.cache_key = ""  # of requests that give none: what older weights made of the same start is not used

    @property
    def url(self) -> str:
        return self.client.url

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[Image], sampling: Sampling, **settings: Any
    ) -> Completion:
        """As `EngineClient.generate`. Where an engine fails or aborts, the turn is asked for again, from the same
        tokens, `turn_tries` times in all and of another engine if one is well. EngineError, or an aborted Completion,
        when the last try ends so."""
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
            self.client = await self._pool.place(failed)
            failed.num_open -= 1
        raise AssertionError
