"""Calls an agent's function in a thread of its own: it may block, and it may be a coroutine, without hurting others."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from actor.env_threads import OF_FUTURES, EnvThreads, TooManyHang
from envs.env_loops import EnvLoop, interrupt
from shared.util.threads import start_thread
from shared.util.user_errors import UserCodeExit

GRACE_S = 5.0  # time that a given up agent has to end, before its thread counts as one that hangs


class AgentThread:
    """One call. A coroutine runs on an event loop of its own. `waiting` has what the function returned or raised."""

    def __init__(self, function: Callable[[], Any], threads: EnvThreads) -> None:
        """Begin the call. Raise TooManyHang if too many threads hang, RuntimeError or MemoryError if none can be
        started."""
        threads.check_lost()
        self._function, self._threads = function, threads
        self._future: Future[Any] = Future()
        self._future.set_running_or_notify_cancel()  # so that nobody can cancel it
        self._lock = threading.Lock()  # guards `_is_lost`
        self._is_lost = False
        self._thread = 0
        start_thread(self._work)
        self.waiting = asyncio.wrap_future(self._future)
        self.waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieved by nobody else

    def give_up(self) -> None:
        """Cancel the coroutine, if it is one. If the function goes on, its thread counts as one that hangs until it
        returns."""
        if not self._future.done():
            interrupt(self._thread)
            asyncio.get_running_loop().call_later(GRACE_S, self._count_lost)

    def _count_lost(self) -> None:
        with self._lock:
            self._is_lost = not self._future.done()
        if self._is_lost:
            with suppress(TooManyHang):  # raised where the next call begins
                self._threads.count_lost()

    def _work(self) -> None:
        self._thread = threading.get_ident()
        try:
            result = self._function()
            if inspect.isawaitable(result):
                loop = EnvLoop()
                try:
                    result = loop.run(result)
                finally:
                    loop.close()
        except BaseException as error:  # noqa: BLE001 - raised in the waiter
            kind = type(error)
            is_plain = issubclass(kind, Exception) and not issubclass(kind, OF_FUTURES)
            self._end(None, error if isinstance(error, Exception) and is_plain else UserCodeExit(error))
        else:
            self._end(result, None)

    def _end(self, result: Any, error: Exception | None) -> None:
        with self._lock:
            if error is None:
                self._future.set_result(result)
            else:
                self._future.set_exception(error)
            is_lost = self._is_lost
        if is_lost:
            self._threads.count_returned()
