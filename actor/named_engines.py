"""The engines that the learner names, for actors on a host without engines. They may come, go and move during the
run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from actor.engine_pool import EnginePool, log
from shared.engine.engine_api import EngineClient, EngineError

LOOK_S = 5.0  # interval between checks of an engine that is no longer named but has episodes
LOG_CHARACTERS = 1000  # limit of one log line
PATIENCE_S = 600.0  # how long an actor without engines waits for the learner to name one


class NamedEngines(EnginePool):
    """A pool of the engines that the learner names. An engine gets episodes once it holds weights of the run. An engine
    that is no longer named gets no new episodes; those playing there continue, and move to another engine when it stops
    answering."""

    def __init__(self, make: Callable[[str], EngineClient], learner: str, *, patience_s: float = PATIENCE_S) -> None:
        """Start without engines. `make` returns the client of a URL, or raises ValueError for an invalid one;
        `patience_s` is how long an episode waits for a ready engine, and the actor for the learner to name one."""
        super().__init__((), patience_s=patience_s)
        self._make = make
        self._learner = learner
        self._by_url: dict[str, EngineClient] = {}  # URLs as the learner sends them
        self._leaving: dict[EngineClient, asyncio.Task[None]] = {}
        self._none_since: float | None = None

    def follow(self, urls: Sequence[str]) -> str:
        """Use these engines from now on. Return why the actor should end; "" if it should not."""
        before = self._by_url
        self._by_url = {url: client for url in urls if (client := before.get(url) or self._add(url))}
        gone = [url for url in before if url not in self._by_url]
        for url in gone:
            self._remove(before[url])
        new = [url for url in self._by_url if url not in before]
        self.clients = tuple(self._by_url.values())
        for what, which in (("named by the learner", new), ("named no more", gone)):
            if which:
                log.info("engines %s: %s", what, ", ".join(which)[:LOG_CHARACTERS])
        if new:
            self._revive_suspects()
            self.wake_waiting()
        return self._exit_reason()

    def no_engine_error(self, failed: EngineClient | None) -> EngineError:
        if self.clients:
            return super().no_engine_error(failed)
        return EngineError(self._learner, f"the learner has named no engine for {self._patience_s:g} s")

    async def close(self) -> None:
        for task in [*self._leaving.values()]:
            task.cancel()
        for client in [*self._leaving]:
            await client.close()
        await super().close()

    def _exit_reason(self) -> str:
        now = time.monotonic()
        if self.clients:
            self._none_since = None
        elif self._none_since is None:
            self._none_since = now
            log.info(
                "learner %s names no engine: this actor has none of its own, and waits up to %g s for one",
                self._learner,
                self._patience_s,
            )
        elif now - self._none_since > self._patience_s:
            return (
                f"learner {self._learner} has named no engine for {now - self._none_since:.0f} s: start "
                "launch/actors.py on hosts with engines, or give this one some (--engine.count, --engine.urls)"
            )
        return ""

    def _add(self, url: str) -> EngineClient | None:
        """Return a client, marked suspect until its engine is ready; None for an invalid URL."""
        try:
            client = self._make(url)
        except ValueError as error:
            self.refusals.add(self._learner, "engine_url", str(error))
            return None
        client.suspect = True
        return client

    def _remove(self, client: EngineClient) -> None:
        if revival := self._revivals.pop(client, None):
            revival.cancel()
        self._leaving[client] = asyncio.create_task(self._leave(client))

    async def _leave(self, client: EngineClient) -> None:
        """Close the client, which ends its requests, as soon as no episode plays there or the engine does not
        answer."""
        with suppress(EngineError):
            while client.num_open:
                await client.health(LOOK_S)
                await asyncio.sleep(LOOK_S)
        del self._leaving[client]
        await client.close()
