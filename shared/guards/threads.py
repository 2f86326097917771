"""Threads that are begun in mid-run, when memory may be short."""

from __future__ import annotations

import _thread
import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
BEGIN_S = 30.0
WAITS = 30  # a thread may begin within that many waits: however long one lasts while the whole process stands still


def start_thread(function: Callable[[], object]) -> None:
    """Like a daemon `threading.Thread`, but nobody waits until it has begun: `threading` waits for ever for one that
    memory runs out for before it can say so. RuntimeError or MemoryError if none can be begun; one that ends while it
    begins calls nothing, so whoever needs its result needs a time limit."""
    _thread.start_new_thread(function, ())


async def in_thread(function: Callable[[], Result]) -> Result:
    """Its result or exception, from a thread that does not keep the process alive. RuntimeError or MemoryError if none
    can be begun. Once there is a result the thread holds nothing of the function's: what ends with its last reference
    ends with the caller's, not in a thread that the end of the process may find in the middle of it."""
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
        except BaseException as error:  # noqa: BLE001  whoever awaits it gets it
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
        began.cancel()  # so that one that begins later calls nothing
    return await asyncio.wrap_future(future)
