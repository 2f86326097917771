"""Runs environments in threads, each call with a time limit. A call that hangs blocks its thread, not the actor."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from shared.guards.threads import start_thread

T = TypeVar("T")
log = logging.getLogger("actor")
QUEUE_FACTOR = 10  # a call may wait for a free thread this many times its limit


class EnvTimeout(Exception):
    """An environment's call took longer than its limit."""


class TooManyHang(BaseException):
    """So many calls hang that the process must end: no `except Exception` of an episode may keep it."""


class Left(Exception):
    """User code raised what would end a thread or a task: `SystemExit`, say."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__} {error}".strip())


async def of_user(awaitable: Awaitable[T]) -> T:
    """What the user's coroutine returns or raises; `Left` where it exits, or is cancelled by nobody but itself."""
    try:
        return await awaitable
    except SystemExit as error:
        raise Left(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Left(error) from error


class _Call:
    """One call: `started_s` is 0 until a thread has it; an `abandoned` one ends its thread when it returns."""

    __slots__ = ("abandoned", "function", "future", "started_s")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.future = function, Future[Any]()
        self.started_s, self.abandoned = 0.0, False


class EnvThreads:
    """A pool of daemon threads. A thread whose call overran its limit is lost until the call returns, and replaced;
    with more than `max_lost` of them lost at once, `run` raises TooManyHang."""

    def __init__(self, num_threads: int = 4, max_lost: int = 64) -> None:
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_threads, self._max_lost = num_threads, max_lost
        self._lock = threading.Lock()  # of the counts and each call's `abandoned`
        self._unwatched: set[asyncio.Future[Any]] = set()  # what goes on without a waiter; else nothing keeps it
        self.num_lost = 0  # now
        self.num_begun = 0  # threads that are alive, lost ones included
        for _ in range(num_threads):
            start_thread(self._work)

    async def run(self, function: Callable[[], T], timeout_s: float) -> T:
        """The function's result or exception, `Left` for one that would end a thread. EnvTimeout `timeout_s` after it
        started. The limit holds for a call whose waiter is cancelled, too."""
        if self.num_lost > self._max_lost:
            raise TooManyHang(self._hanging())
        call = _Call(function)
        self._inbox.put(call)
        waiting = asyncio.wrap_future(call.future)
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # when nobody waits any more
        queued_s = time.monotonic()
        wait_s = timeout_s
        while wait_s > 0:
            try:
                done, _ = await asyncio.wait([waiting], timeout=wait_s)
            except asyncio.CancelledError:
                self._leave(call, timeout_s)
                self._keep(waiting)
                raise
            if done:
                return waiting.result()
            now = time.monotonic()
            wait_s = call.started_s + timeout_s - now if call.started_s else queued_s + QUEUE_FACTOR * timeout_s - now
        if not call.started_s:
            call.future.cancel()
            if self.num_begun - self.num_lost < self._num_threads:
                self._spawn()
            raise EnvTimeout(f"no free thread within {QUEUE_FACTOR * timeout_s:g} s")
        if not self._abandon(call):
            return call.future.result()
        log.warning("an environment call overran its %g s; its thread is replaced (%d hang)", timeout_s, self.num_lost)
        self._spawn()
        raise EnvTimeout(f"no return within {timeout_s:g} s")

    def run_unwatched(self, function: Callable[[], Any], timeout_s: float) -> None:
        """The same without a waiter; a failure is logged."""

        task = asyncio.create_task(self.run(function, timeout_s))
        self._keep(task)
        task.add_done_callback(_log_failure)

    async def to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises; it goes on where its waiter is cancelled, and its failure is logged."""
        task = asyncio.create_task(work)
        self._keep(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    def _keep(self, work: asyncio.Future[Any]) -> None:
        self._unwatched.add(work)
        work.add_done_callback(self._unwatched.discard)

    async def settle(self, within_s: float) -> None:
        """Waits so long for what goes on after episodes were cancelled, such as the end of their environments."""
        if self._unwatched and (left := (await asyncio.wait(self._unwatched, timeout=within_s))[1]):
            log.warning("%d calls of cancelled episodes go on after %g s and are left behind", len(left), within_s)

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._inbox.put(None)

    def _leave(self, call: _Call, timeout_s: float) -> None:
        """Nobody waits for `call` any more: it does not begin, or is watched until its limit."""
        if call.future.cancel() or call.future.done():
            return

        def replace_thread() -> None:
            with suppress(TooManyHang):  # the next call raises it
                if not self._abandon(call):
                    return
            log.warning("a call of a cancelled episode overran its %g s; its thread is replaced", timeout_s)
            self._spawn()

        spent_s = time.monotonic() - call.started_s if call.started_s else 0.0
        asyncio.get_running_loop().call_later(max(0.0, timeout_s - spent_s), replace_thread)

    def _abandon(self, call: _Call) -> bool:
        """Counts the thread of `call` as lost; false if it has just ended."""
        with self._lock:
            call.abandoned = not call.future.done()
        if call.abandoned:
            self.lose()
        return call.abandoned

    def lose(self) -> None:
        """Counts one more thread that hangs. TooManyHang beyond `max_lost`."""
        with self._lock:
            self.num_lost += 1
            if self.num_lost > self._max_lost:
                raise TooManyHang(self._hanging())

    def _hanging(self) -> str:
        return f"{self.num_lost} calls of environments and rewards hang"

    def find(self) -> None:
        """Counts one less: its call has returned."""
        with self._lock:
            self.num_lost -= 1

    def _spawn(self) -> None:
        """One thread more, unless memory is short: then a call that finds none within its limit begins one."""
        with suppress(RuntimeError, MemoryError):
            start_thread(self._work)

    def _work(self) -> None:
        with self._lock:
            self.num_begun += 1
        try:
            self._serve()
        finally:
            with self._lock:
                self.num_begun -= 1

    def _serve(self) -> None:
        while (call := self._inbox.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            call.started_s = time.monotonic()
            try:
                result = call.function()
            except Exception as error:  # noqa: BLE001 - handed to the waiter, who raises it
                call.future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - likewise
                call.future.set_exception(Left(error))
            else:
                call.future.set_result(result)
            with self._lock:
                abandoned = call.abandoned
            if abandoned:
                self.find()
                return
            del call  # with all that its function holds


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a call after a cancelled episode failed: %s: %s", type(error).__name__, error)


class EnvCalls:
    """The calls of one episode's environment, one after another, each in a thread. Whoever gives the episode up does
    not wait for the call that runs then: its thread closes the environment when it returns."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._lock, self._close = threading.Lock(), close
        self._running = self._given_up = False

    def guarded(self, function: Callable[[], T]) -> Callable[[], T]:
        """The function, after which the environment is closed where the episode was given up meanwhile."""

        def call() -> T:
            with self._lock:
                if self._given_up:
                    raise EnvTimeout("the episode was given up")
                self._running = True
            try:
                return function()
            finally:
                with self._lock:
                    self._running, closes = False, self._given_up
                if closes:
                    self._close_logged()

        return call

    def _close_logged(self) -> None:
        try:
            self._close()
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises
            log.warning("an environment's close failed: %s: %s", type(error).__name__, error)

    def give_up(self) -> bool:
        """Whether no call runs, so that the caller is to close the environment."""
        with self._lock:
            self._given_up = True
            return not self._running
