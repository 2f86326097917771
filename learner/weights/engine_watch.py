"""Detection of engines that come back, while the learner waits for groups, without the weights they should hold."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future

from learner.weights.engine_link import EngineLink
from learner.weights.engine_roster import WELL_PROBES
from shared.engine.engine_api import EngineError, each
from shared.log import get_logger

LOG = get_logger("publisher")
PATIENCE_S = 2.0  # a shorter wait sends no request
CALL_S = 3.0
# If no engine holds the weights, an engine that was left out is tried again after this time.
RETRY_S = 20.0


class EngineWatch:
    """A context that polls the engines and sets `publication_due` once one of them reports weights of another name.

    Such a name may have the same version number, if a dead learner published it.

    With `fresh` false the learner's weights have changed since `name`. Then `publication_due` is set only if no engine
    holds `name` any more: nobody would play until the next publication, and without episodes there is none.

    An engine that the last publication left out would be left out again, and each attempt may pause the other engines.
    It counts only once it has been silent, or has reported another name than after that publication, as a restarted
    engine does. If no engine holds `name` there is nobody to pause, and such an engine is tried again after `RETRY_S`.

    An engine that did not confirm after a publication that it resumed is told again, whatever weights it reports.
    """

    def __init__(
        self,
        link: EngineLink,
        engines: Callable[[], Collection[str]],
        name: str,
        *,
        fresh: bool = True,
        until: float = math.inf,
        left_out: Future[dict[str, str]] | None = None,
    ) -> None:
        """Prepare a watch.

        `until`: a time of the monotonic clock; soon after it `publication_due` is set in any case. `left_out`: URL ->
        name of the weights that each engine left out by the last publication reported afterwards. An engine that counts
        again is removed from it, on the link's thread.
        """
        self._link = link
        self._engines = engines
        self._name = name
        self._fresh = fresh
        self._until = until
        self._left_out = left_out
        self.publication_due = threading.Event()
        self._watching: Future[None] | None = None

    def __enter__(self) -> EngineWatch:
        self._watching = self._link.start(self._watch())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()

    async def _watch(self) -> None:
        retry_at, failure = time.monotonic() + RETRY_S, ""
        while True:
            await asyncio.sleep(PATIENCE_S)
            if time.monotonic() >= self._until:
                break
            try:
                paused = {engine.url for engine in self._link.maybe_paused}
                await each(paused.intersection(url.rstrip("/") for url in self._engines()), self._resume)
                reason = await self._find_reason(retry=time.monotonic() >= retry_at)
            # Nobody waits for this task, so an error is logged here, once, and the watch continues.
            except Exception as error:
                if repr(error) != failure:
                    LOG.exception("the engines are not watched at the moment")
                failure = repr(error)
                continue
            if reason:
                LOG.info("engine %s; version %s goes out again", reason, self._name)
                break
        self.publication_due.set()

    async def _resume(self, url: str) -> None:
        client = self._link.client(url)
        await self._link.resume(client, CALL_S)
        LOG.info("engine %s, which was still paused, goes on", client.url)

    async def _find_reason(self, *, retry: bool) -> str:
        """Return which engine needs the weights and why, as text; empty if none does."""
        left_out: dict[str, str] = {}
        if self._left_out is not None:
            left_out = await asyncio.shield(asyncio.wrap_future(self._left_out))
        well, _ = await self._link.roster.find(self._engines(), CALL_S)
        names = await reported_weights(self._link, well)
        for url in [url for url, name in left_out.items() if names.get(url) != name]:
            del left_out[url]
        others = sorted(url for url, name in names.items() if name != self._name)
        nobody = self._name not in names.values()
        back = [url for url in others if url not in left_out]
        if back and (self._fresh or nobody):
            return f"{back[0]} is back"
        return f"{others[0]} was left out, and none has the weights" if others and nobody and retry else ""


async def reported_weights(link: EngineLink, urls: Collection[str]) -> dict[str, str]:
    """Ask the engines for the name of their weights; return URL -> name for the healthy ones."""

    async def ask(url: str) -> object:
        client = link.client(url)
        await client.health(CALL_S)
        return await client.weight_version(CALL_S)

    answers = await each(urls, ask, at_once=WELL_PROBES)
    return {url.rstrip("/"): str(name) for url, name in answers.items() if name and not isinstance(name, EngineError)}
