"""Access to the engines from a thread without an event loop: their clients run on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from learner.weights.engine_roster import EngineRoster
from shared.engine.engine_api import EngineClient, EngineError
from shared.log import get_logger

Result = TypeVar("Result")
STANDSTILL_S = 10.0  # a running loop answers within this time; one that does not is named in the log
GIVE_UP_S = 300.0  # a loop that has not answered for this long will never
RESUME_TRIES = 3
RESUME_AGAIN_S = 0.25


class EngineLink:
    """Rank 0's clients of all engines, which share an API key. Every coroutine on the loop must limit its own time.

    `roster`: which of the named engines answer. `maybe_paused`: engines that were told to resume and have not confirmed
    it; used on the loop's thread only.
    """

    def __init__(self, api_key: str = "") -> None:
        self.maybe_paused: set[EngineClient] = set()
        self._api_key = api_key
        self._log = get_logger("publisher")
        self._clients: dict[str, EngineClient] = {}
        self._closing = set[asyncio.Task[None]]()
        self.roster = EngineRoster(self.client, self._forget)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()

    def client(self, url: str) -> EngineClient:
        """Return the client of a URL, always the same one. Raise EngineError if it is not a URL: actors name the
        engines, so the text may be anything."""
        url = url.rstrip("/")
        if url not in self._clients:
            try:
                self._clients[url] = EngineClient(url, api_key=self._api_key)
            except ValueError as error:
                raise EngineError(url, str(error), sent=False) from None
        return self._clients[url]

    def _forget(self, url: str) -> None:
        """Close the client of an engine that does not answer; it takes descriptors and memory."""
        if client := self._clients.pop(url, None):
            task = self._loop.create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def resume(self, engine: EngineClient, limit_s: float) -> None:
        """Tell a paused engine to resume, up to `RESUME_TRIES` times within `limit_s`.

        Raise EngineError if the engine has not confirmed; it stays in `maybe_paused` then.
        """
        self.maybe_paused.add(engine)
        deadline, left_s = time.monotonic() + limit_s, limit_s
        for tries_left in reversed(range(RESUME_TRIES)):
            try:
                await engine.resume(left_s)
                break
            except EngineError:
                left_s = deadline - time.monotonic() - RESUME_AGAIN_S
                if not tries_left or left_s <= 0:
                    raise
            await asyncio.sleep(RESUME_AGAIN_S)
        self.maybe_paused.discard(engine)

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and return its result, as `wait` does."""
        return self.wait(self.start(coroutine))

    def wait(self, future: Future[Result]) -> Result:
        """Wait for a result and return it.

        A loop that stands still, because the machine is overloaded or one call keeps it, is logged with the line where
        it stands. Raise TimeoutError if it does so for `GIVE_UP_S`: it stands still forever if memory runs out while it
        starts a thread.
        """
        while not wait([future], STANDSTILL_S).done:
            answered, since = threading.Event(), time.monotonic()
            self._loop.call_soon_threadsafe(answered.set)
            while not answered.wait(STANDSTILL_S):
                stood_s = time.monotonic() - since
                words = f"the thread that speaks with the engines has stood still for {stood_s:.0f} s"
                if stood_s > GIVE_UP_S:
                    raise TimeoutError(f"{words} ({self._position()}); out of memory? start the learner again")
                self._log.warning("%s (%s); the learner waits up to %g s for it", words, self._position(), GIVE_UP_S)
        return future.result()

    def _position(self) -> str:
        """Return what the loop's thread is doing now: the innermost lines of its stack, on one line."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame)[-3:] if frame else []
        return " > ".join(f"{line.name} in {line.filename.rpartition('/')[2]}:{line.lineno}" for line in stack)

    def close(self) -> None:
        """Close all clients and end the loop. Call it once, when nothing runs on the loop any more."""

        async def close() -> None:
            self.roster.close()
            for client in self._clients.values():
                await client.close()

        self.run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
