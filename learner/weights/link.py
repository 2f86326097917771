"""The engines, for a thread without an event loop: their clients live on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from shared.engine_api import EngineClient, EngineError

Result = TypeVar("Result")
STANDSTILL_S = 10.0  # in which a loop that runs has answered


class EngineLink:
    """Rank 0's clients of all engines, which share an API key. What runs on the loop limits its own time."""

    def __init__(self, api_key: str = "") -> None:
        self._api_key = api_key
        self._clients: dict[str, EngineClient] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engines", daemon=True).start()

    def client(self, url: str, api_key: str | None = None) -> EngineClient:
        """Always the same one for a URL, with an `api_key` of its own if there is one. EngineError for what is no URL:
        engines are told by actors."""
        url = url.rstrip("/")
        if url not in self._clients:
            try:
                self._clients[url] = EngineClient(url, api_key=self._api_key if api_key is None else api_key)
            except ValueError as error:
                raise EngineError(url, str(error), sent=False) from None
        return self._clients[url]

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self.wait(self.start(coroutine))

    def wait(self, future: Future[Result]) -> Result:
        """Its result. TimeoutError if the loop itself stands still, as it does for ever where memory runs out while it
        starts a thread."""
        while not wait([future], STANDSTILL_S).done:
            here = threading.Event()
            self._loop.call_soon_threadsafe(here.set)
            if not here.wait(STANDSTILL_S):
                raise TimeoutError(
                    f"the thread that speaks with the engines has stood still for {STANDSTILL_S:.0f} s; out of memory? "
                    "start the learner again"
                )
        return future.result()

    def close(self) -> None:
        """Once; nothing runs on the loop any more."""

        async def close() -> None:
            for client in self._clients.values():
                await client.close()

        self.run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
