"""The engines that the learner names, for actors on a host that has none: they come, go and move while actors play."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from actor.engine_pool import EnginePool, log
from shared.engine_api import EngineClient, EngineError

LOOK_S = 5.0  # between two looks at an engine that is named no more and has episodes
SAID = 1000  # characters of a log line


class NamedEngines(EnginePool):
    """An engine gets episodes once it holds weights of the run. One that is named no more gets no new ones: those that
    play there go on, at another engine as soon as it does not answer."""

    def __init__(
        self, make: Callable[[str], EngineClient], learner: str, *, patience_s: float, turn_tries: int = 3
    ) -> None:
        """`make`: the client of a URL, ValueError for what is none; `patience_s`: how long an episode waits for an
        engine that is ready, and the actor until the learner names one."""
        super().__init__((), patience_s=patience_s, turn_tries=turn_tries)
        self._make, self._learner = make, learner
        self._by_url: dict[str, EngineClient] = {}  # as the learner writes it
        self._leaving: dict[EngineClient, asyncio.Task[None]] = {}
        self._none_since: float | None = None

    def follow(self, urls: Sequence[str]) -> str:
        """These are the run's engines now. Why the actor is to end; empty while it is not."""
        before = self._by_url
        self._by_url = {url: client for url in urls if (client := before.get(url) or self._meet(url))}
        gone = [url for url in before if url not in self._by_url]
        for url in gone:
            self._let_go(before[url])
        new = [url for url in self._by_url if url not in before]
        self.clients = tuple(self._by_url.values())
        for what, which in (("named by the learner", new), ("named no more", gone)):
            if which:
                log.info("engines %s: %s", what, ", ".join(which)[:SAID])
        if new:
            self._revive_suspects()
            self.tell()
        return self._missing()

    def nobody(self, failed: EngineClient | None) -> EngineError:
        if self.clients:
            return super().nobody(failed)
        return EngineError(self._learner, f"the learner has named no engine for {self._patience_s:g} s")

    async def close(self) -> None:
        for task in [*self._leaving.values()]:
            task.cancel()
        for client in [*self._leaving]:
            await client.close()
        await super().close()

    def _missing(self) -> str:
        now = time.monotonic()
        if self.clients:
            self._none_since = None
        elif self._none_since is None:
            self._none_since = now
            log.info(
                "learner %s names no engine: this actor has none of its own, and waits up to %g s for one "
                "(actor.engines_timeout_s)",
                self._learner,
                self._patience_s,
            )
        elif now - self._none_since > self._patience_s:
            return (
                f"learner {self._learner} has named no engine for {now - self._none_since:.0f} s "
                "(actor.engines_timeout_s): start launch/actors.py on hosts with engines, or give this one some "
                "(--engine.count, --engine.urls)"
            )
        return ""

    def _meet(self, url: str) -> EngineClient | None:
        """A client that is suspect until its engine is ready; None for what is no URL of a host."""
        try:
            client = self._make(url)
        except ValueError as error:
            self.refusals.add(self._learner, "engine_url", str(error))
            return None
        client.suspect = True
        return client

    def _let_go(self, client: EngineClient) -> None:
        if revival := self._revivals.pop(client, None):
            revival.cancel()
        self._leaving[client] = asyncio.create_task(self._leave(client))

    async def _leave(self, client: EngineClient) -> None:
        """Closes the client, which ends its requests, when no episode plays there or the engine does not answer."""
        with suppress(EngineError):
            while client.num_open:
                await client.health(LOOK_S)
                await asyncio.sleep(LOOK_S)
        del self._leaving[client]
        await client.close()
