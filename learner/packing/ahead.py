"""Work on the host that a thread does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

from shared.guards.threads import BEGIN_S, start_thread

Item = TypeVar("Item")
Made = TypeVar("Made")
LOOK_S = 1.0


@contextmanager
def ahead(make: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Iterator[Made]]:
    """`make` of each item, in their order: the next by a thread while this one is in use, and no further ahead.

    What `make` raises is raised where its result is asked for. The thread ends with the context, at the latest when it
    is done with the item at hand. MemoryError where memory runs out while it begins or ends.
    """
    asked: SimpleQueue[tuple[Future[Made], Item] | None] = SimpleQueue()
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while (job := asked.get()) is not None:
                future, item = job
                try:
                    future.set_result(make(item))
                except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
                    future.set_exception(error)
                del job, future, item
        finally:
            ended.set()

    def submitted(item: Item) -> Future[Made]:
        future: Future[Made] = Future()
        asked.put((future, item))
        return future

    def result_of(future: Future[Made]) -> Made:
        if not begun.wait(BEGIN_S):
            raise MemoryError(f"a thread has not begun within {BEGIN_S:g} s")
        while not wait([future], LOOK_S).done:
            if ended.is_set() and not future.done():
                raise MemoryError("a thread has ended before its work was done")
        return future.result()

    def made() -> Iterator[Made]:
        waiting = [submitted(item) for item in items[:1]]
        for item in items[1:]:
            result = result_of(waiting.pop())
            waiting.append(submitted(item))
            yield result
        if waiting:
            yield result_of(waiting.pop())

    start_thread(work)
    try:
        yield made()
    finally:
        asked.put(None)
        if begun.is_set():
            ended.wait()
