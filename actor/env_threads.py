"""Run environments in threads, each call with a time limit. A call that hangs blocks its thread, not the actor."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from envs.env_loops import interrupt
from shared.util.threads import start_thread
from shared.util.user_errors import UserCodeExit, describe

T = TypeVar("T")
log = logging.getLogger("actor")
OF_FUTURES = (StopIteration, CancelledError, InvalidStateError)  # a future takes these for facts of its own
QUEUE_FACTOR = 10  # a call may wait for a free thread this many times its limit


class EnvTimeout(Exception):
    """A call of an environment took longer than its limit."""


class TooManyHang(BaseException):
    """So many calls hang that the process must end. A BaseException, so that no `except Exception` of an episode
    catches it."""


class _ThreadCall:
    """One call. `started_s` is 0 until a `thread` starts it; an `abandoned` call ends its thread when it returns."""

    __slots__ = ("abandoned", "function", "future", "started_s", "thread")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.future = function, Future[Any]()
        self.started_s, self.thread, self.abandoned = 0.0, 0, False


class EnvThreads:
    """A pool of daemon threads. A thread whose call overruns its limit counts as lost until the call returns, and is
    replaced; a coroutine that it waits for is cancelled. With more than `max_lost` lost threads at once, `run` raises
    TooManyHang."""

    def __init__(self, num_threads: int = 4, max_lost: int = 64) -> None:
        self._inbox: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        self._num_threads, self._max_lost = num_threads, max_lost
        self._lock = threading.Lock()  # guards the counts and each call's `abandoned`
        # Strong references to work without a waiter, which asyncio would otherwise drop.
        self._unwatched: set[asyncio.Future[Any]] = set()
        self.num_lost = 0  # now
        self.num_begun = 0  # number of running threads, lost ones included
        for _ in range(num_threads):
            start_thread(self._work)

    async def run(self, function: Callable[[], T], timeout_s: float) -> T:
        """Return the function's result or raise its exception; raise `UserCodeExit` for an exception that would end a
        thread, EnvTimeout `timeout_s` after the start. The limit also holds for a call whose waiter is cancelled."""
        self.check_lost()
        call = _ThreadCall(function)
        self._inbox.put(call)
        waiting = asyncio.wrap_future(call.future)
        # Retrieves the exception in case nobody waits any more.
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
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
        """Run a function as `run` does, without a waiter; log its failure."""
        task = asyncio.create_task(self.run(function, timeout_s))
        self._keep(task)
        task.add_done_callback(_log_failure)

    async def to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns or raise what it raises. If the waiter is cancelled, the coroutine
        continues, and a failure is logged."""
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
        """Wait at most `within_s` for the work that continues after episodes were cancelled, such as closing their
        environments."""
        if self._unwatched and (left := (await asyncio.wait(self._unwatched, timeout=within_s))[1]):
            log.warning("%d calls of cancelled episodes go on after %g s and are left behind", len(left), within_s)

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._inbox.put(None)

    def _leave(self, call: _ThreadCall, timeout_s: float) -> None:
        """Give up a call that nobody waits for any more: cancel it if it has not started, else replace its thread if it
        overruns its limit."""
        if call.future.cancel() or call.future.done():
            return

        def replace_thread() -> None:
            with suppress(TooManyHang):  # raised by the next call instead
                if not self._abandon(call):
                    return
            log.warning("a call of a cancelled episode overran its %g s; its thread is replaced", timeout_s)
            self._spawn()

        spent_s = time.monotonic() - call.started_s if call.started_s else 0.0
        asyncio.get_running_loop().call_later(max(0.0, timeout_s - spent_s), replace_thread)

    def _abandon(self, call: _ThreadCall) -> bool:
        """Count the thread of `call` as lost; return False if the call has just ended."""
        with self._lock:
            call.abandoned = not call.future.done()
            if call.abandoned:
                interrupt(call.thread)
        if call.abandoned:
            self.count_lost()
        return call.abandoned

    def count_lost(self) -> None:
        """Count one more thread that hangs. Raise TooManyHang beyond `max_lost`."""
        with self._lock:
            self.num_lost += 1
            if self.num_lost > self._max_lost:
                raise TooManyHang(self._hanging())

    def check_lost(self) -> None:
        """Raise TooManyHang if more than `max_lost` threads hang."""
        if self.num_lost > self._max_lost:
            raise TooManyHang(self._hanging())

    def _hanging(self) -> str:
        return f"{self.num_lost} calls of environments and rewards hang"

    def count_returned(self) -> None:
        """Count one hanging thread less: its call has returned."""
        with self._lock:
            self.num_lost -= 1

    def _spawn(self) -> None:
        """Start a thread. If memory is short, none is started, and a later call that waits too long for a thread tries
        again."""
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
            call.thread, call.started_s = threading.get_ident(), time.monotonic()
            try:
                result = call.function()
            except BaseException as error:  # noqa: BLE001 - raised in the waiter
                kind = type(error)
                is_plain = issubclass(kind, Exception) and not issubclass(kind, OF_FUTURES)
                call.future.set_exception(error if is_plain else UserCodeExit(error))
            else:
                call.future.set_result(result)
            with self._lock:
                abandoned = call.abandoned
            if abandoned:
                self.count_returned()
                return
            del call  # frees what its function refers to


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a call after a cancelled episode failed: %s", describe(error))


class EnvCalls:
    """The calls of one episode's environment, one after another, each in a thread. Giving up the episode does not wait
    for a running call: the call's thread closes the environment when the call returns."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._lock, self._close = threading.Lock(), close
        self._running = self._given_up = False

    def guarded(self, function: Callable[[], T]) -> Callable[[], T]:
        """Wrap the function so that the environment is closed after it if the episode was given up meanwhile."""

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
        except BaseException as error:  # noqa: BLE001 - the user's function may raise anything
            log.warning("an environment's close failed: %s", describe(error))

    def give_up(self) -> bool:
        """Give up the episode; return True if no call is running, so that the caller must close the environment."""
        with self._lock:
            self._given_up = True
            return not self._running
