"""Several engines as one: an episode plays on one of them from beginning to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from shared.engine_api import EngineClient, EngineError


class EnginePool:
    """Several engines: a new episode goes to the one with the fewest, and stays there for its prefix cache.

    An engine whose last request failed gets no new episode until it answers again with weights of this run; if no other
    is well, a new episode waits up to `patience_s` for it, so that a dead engine costs time and not a flood of failed
    episodes.
    """

    def __init__(self, clients: Sequence[EngineClient], *, patience_s: float = 30.0) -> None:
        if not clients:
            raise ValueError("no engine: give engine.urls or engine.count")
        self.clients, self._patience_s = tuple(clients), patience_s
        self._revivals: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[EngineClient]:
        """The engine for one episode. EngineError if it stays away."""
        for suspect in (client for client in self.clients if client.suspect):
            if suspect.url not in self._revivals:
                self._revivals[suspect.url] = asyncio.create_task(self._revive(suspect))
        client = min(self.clients, key=lambda c: (c.suspect, c.num_open))
        client.num_open += 1
        try:
            if client.suspect:
                await client.wait_ready(self._patience_s)
            yield client
        finally:
            client.num_open -= 1

    async def _revive(self, client: EngineClient) -> None:
        """Asks a suspect engine until it is ready again or `patience_s` is over; the next episode asks anew."""
        with suppress(EngineError):
            await client.wait_ready(self._patience_s)
        del self._revivals[client.url]

    async def close(self) -> None:
        for task in self._revivals.values():
            task.cancel()
        for client in self.clients:
            await client.close()
