"""Event loops for the coroutines of environments: one for each environment that has any, in a thread of its own.

All calls of an environment run on its loop, so what it opens there (a session, a browser) stays usable between calls,
and what blocks the loop hurts no other environment. Whoever calls waits, and keeps the time limit, as for plain calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from shared.util.threads import start_thread
from shared.util.user_errors import UserCodeExit

T = TypeVar("T")
END_S = 1.0  # time that tasks of a closed loop have to end
_waiting: dict[int, _Running] = {}  # what a thread waits for, by the thread's identifier


async def contained(awaitable: Awaitable[T]) -> T:
    """Return what the user's coroutine returns and raise what it raises; raise `UserCodeExit` if it raises SystemExit
    or KeyboardInterrupt, or cancels itself."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserCodeExit(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UserCodeExit(error) from error


def interrupt(thread: int) -> None:
    """Cancel the coroutine that the thread waits for, if it waits for one."""
    if (running := _waiting.get(thread)) is not None:
        with suppress(RuntimeError):  # the loop is closed
            running.loop.call_soon_threadsafe(running.cancel)


class _Running:
    """A coroutine that somebody waits for. One that blocks its loop is not cancelled before it awaits something."""

    __slots__ = ("loop", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def run(self, awaitable: Awaitable[T]) -> T:
        self.task = asyncio.current_task()
        return await contained(awaitable)


class EnvLoop:
    """An event loop that runs in a daemon thread until `close`; it never keeps the process. Several threads may run
    coroutines on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonThreads(max_workers=1))
        try:
            start_thread(self._serve)
        except BaseException:
            self._loop.close()
            raise

    def run(self, awaitable: Awaitable[T]) -> T:
        """Return what the awaitable returns or raise what it raises."""
        thread, running = threading.get_ident(), _Running(self._loop)
        _waiting[thread] = running
        try:
            return asyncio.run_coroutine_threadsafe(running.run(awaitable), self._loop).result()
        finally:
            del _waiting[thread]

    def close(self) -> None:
        """Stop the loop when it is free; do not wait for it."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        """Cancel the tasks that the environment has left, and close its generators."""
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=END_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._loop.shutdown_asyncgens(), END_S)


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call of `asyncio.to_thread` in a daemon thread. Those of a plain pool would keep the process from
    ending."""

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **named))
            except BaseException as error:  # noqa: BLE001  raised in the coroutine that waits
                future.set_exception(error if isinstance(error, Exception) else UserCodeExit(error))

        start_thread(run)
        return future
