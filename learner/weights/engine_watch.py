"""Engines that come back while the learner waits for groups: started anew, and without the weights they should hold."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future

from learner.weights.link import EngineLink
from learner.weights.update import STILL_PAUSED, resume
from shared.engine_api import EngineError, each
from shared.log import get_logger

LOG = get_logger("publisher")
PATIENCE_S = 2.0  # a wait shorter than this asks nobody
CALL_S = 3.0
RETRY_S = 20.0  # until an engine that was left out is tried again, where none has the weights


class EngineWatch:
    """While entered, asks the engines every few seconds; sets `found` once one answers that holds weights of another
    name, such as those of the same number that a dead learner published.

    With `fresh` false the learner's weights have moved on since `name`: then only once no engine holds it any more, for
    nobody would play until the next publication, and without episodes there is none.

    An engine that the last publication left out for a reason would be left out again, and each time the others may be
    paused: it counts only once it has been silent since, or has called its weights otherwise, as one that was started
    anew does. Where no engine holds `name` there is nobody to pause, and it is tried again after `RETRY_S`.

    An engine that could not be told to go on after a publication, whatever it calls its weights, is told again.
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
        """`until`, by the monotonic clock: soon after it `found` is set in any case. `left_out`: what those that the
        last publication left out called their weights after it; who counts again is taken out, on the link's thread."""
        self._link, self._engines, self._name, self._fresh = link, engines, name, fresh
        self._until, self._left_out = until, left_out
        self.found = threading.Event()
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
                await each(self._engines(), self._resume)
                words = await self._reason(retry=time.monotonic() >= retry_at)
            except Exception as error:  # nobody waits for this: it is said here, once, and the watching goes on
                if repr(error) != failure:
                    LOG.exception("the engines are not watched at the moment")
                failure = repr(error)
                continue
            if words:
                LOG.info("engine %s; version %s goes out again", words, self._name)
                break
        self.found.set()

    async def _resume(self, url: str) -> None:
        client = self._link.client(url)
        if client in STILL_PAUSED:
            await resume(client, CALL_S)
            LOG.info("engine %s, which was still paused, goes on", client.url)

    async def _reason(self, *, retry: bool) -> str:
        """Which engine is to be given the weights, and why; empty if none is."""
        left_out: dict[str, str] = {}
        if self._left_out is not None:
            left_out = await asyncio.shield(asyncio.wrap_future(self._left_out))
        held = await said_by(self._link, self._engines())
        for url in [url for url, name in left_out.items() if held.get(url) != name]:
            del left_out[url]
        others = sorted(url for url, name in held.items() if name != self._name)
        nobody = self._name not in held.values()
        back = [url for url in others if url not in left_out]
        if back and (self._fresh or nobody):
            return f"{back[0]} is back"
        return f"{others[0]} was left out, and none has the weights" if others and nobody and retry else ""


async def said_by(link: EngineLink, urls: Collection[str]) -> dict[str, str]:
    """What those that are healthy call their weights, by URL."""

    async def ask(url: str) -> object:
        client = link.client(url)
        await client.health(CALL_S)
        return await client.weight_version(CALL_S)

    answers = await each(urls, ask)
    return {url.rstrip("/"): str(said) for url, said in answers.items() if said and not isinstance(said, EngineError)}
