"""Starting threads during a run, when memory may be short."""

from __future__ import annotations

import _thread
import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
BEGIN_S = 30.0
# The time for a thread's start is split into this many waits: one long pause of the whole process uses up only one.
WAITS = 30


def start_thread(function: Callable[[], object]) -> None:
    """Start a daemon thread as `threading.Thread` does, but without waiting until it has begun: `threading` waits for
    ever if memory runs out before the new thread can report its start. Raise RuntimeError or MemoryError if no thread
    can be started. A thread that dies while it starts never calls the function, so a caller that needs the result needs
    a time limit."""
    _thread.start_new_thread(function, ())


async def in_thread(function: Callable[[], Result]) -> Result:
    """Run a function in a thread that does not keep the process alive; return its result or raise its exception.
    Raise RuntimeError or MemoryError if no thread can be started. When the result is there, the thread holds no
    reference to the function or its objects any more: their finalizers run in the caller, not in a thread that the end
    of the process may interrupt."""
    future: Future[Result] = Future()
    work = [function]
    del function
    future.set_running_or_notify_cancel()  # so that nobody can cancel it
    begun: Future[None] = Future()

    def run() -> None:
        if not begun.set_running_or_notify_cancel():
            return
        begun.set_result(None)
        try:
            future.set_result(work.pop()())
        except BaseException as error:  # noqa: BLE001  raised by the caller's await
            future.set_exception(error)

    start_thread(run)
    began = asyncio.wrap_future(begun)
    try:
        for _ in range(WAITS):
            if (await asyncio.wait([began], timeout=BEGIN_S / WAITS))[0]:
                break
        else:
            raise MemoryError(f"a thread has not begun within {BEGIN_S:g} s")
    finally:
        began.cancel()  # a thread that starts after this calls nothing
    return await asyncio.wrap_future(future)
