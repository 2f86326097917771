"""Threads that are begun in mid-run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from shared.util import threads
from shared.util.threads import in_thread


def test_what_runs_in_a_thread_gives_its_result_or_its_exception() -> None:
    async def main() -> None:
        assert await in_thread(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)

    asyncio.run(main())


def test_a_thread_that_never_begins_is_a_memory_error_within_its_limit(monkeypatch) -> None:
    late = []
    monkeypatch.setattr(threads, "start_thread", late.append)
    monkeypatch.setattr(threads, "BEGIN_S", 0.05)
    called = []
    with pytest.raises(MemoryError, match="has not begun"):
        asyncio.run(asyncio.wait_for(in_thread(lambda: called.append(1)), 30))
    late[0]()
    assert not called


def test_a_process_that_stood_still_lets_its_threads_begin_afterwards(monkeypatch) -> None:
    """The time limit has passed once the loop goes on, and the thread has not had its turn yet."""
    monkeypatch.setattr(threads, "BEGIN_S", 0.3)

    async def main() -> int:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(threads, "start_thread", lambda run: loop.call_later(0.01, begin, run))
        return await in_thread(lambda: 3)

    def begin(run: Callable[[], None]) -> None:
        time.sleep(0.4)
        asyncio.get_running_loop().call_later(0.01, run)

    assert asyncio.run(main()) == 3


def test_a_thread_that_nobody_waits_for_any_more_ends_without_a_word(recwarn) -> None:
    ended = threading.Event()

    async def main() -> None:
        go = threading.Event()
        task = asyncio.create_task(in_thread(lambda: (go.wait(30), ended.set())))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        go.set()
        await asyncio.to_thread(ended.wait, 30)
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert ended.is_set() and not recwarn.list
