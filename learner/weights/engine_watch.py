"""Engines that come back while the learner waits for groups: started anew, and without the weights they should hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future

from learner.weights.link import EngineLink
from shared.engine_api import EngineError, each
from shared.log import get_logger

PATIENCE_S = 2.0  # a wait shorter than this asks nobody
CALL_S = 3.0


class EngineWatch:
    """While entered, asks the engines every few seconds; sets `found` once one answers that holds weights of another
    name, such as those of the same number that a dead learner published.

    With `fresh` false the learner's weights have moved on since `name`: then only once no engine holds it any more, for
    nobody would play until the next publication, and without episodes there is none.
    """

    def __init__(
        self, link: EngineLink, engines: Callable[[], Collection[str]], name: str, *, fresh: bool = True
    ) -> None:
        self._link, self._engines, self._name, self._fresh = link, engines, name, fresh
        self.found = threading.Event()
        self._watching: Future[None] | None = None

    def __enter__(self) -> EngineWatch:
        self._watching = self._link.start(self._watch())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()

    async def _watch(self) -> None:
        wanted = self._name
        while True:
            await asyncio.sleep(PATIENCE_S)
            answers = await each(self._engines(), lambda url: self._link.client(url).weight_version(CALL_S))
            held = {url: str(said) for url, said in answers.items() if said and not isinstance(said, EngineError)}
            others = sorted(url for url, version in held.items() if version != wanted)
            if others and (self._fresh or wanted not in held.values()):
                get_logger("publisher").info("engine %s is back; version %s goes out again", others[0], wanted)
                self.found.set()
                return
