"""Work on the host that a thread does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeVar

from shared.guards.threads import BEGIN_S, start_thread

Item = TypeVar("Item")
Made = TypeVar("Made")
LOOK_S = 1.0


@contextmanager
def ahead(make: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Iterator[Made]]:
    """`make` of each item, in their order: the next by a thread while this one is in use, and no further ahead.

    What `make` raises is raised where its result is asked for. The thread ends with the context, at the latest when it
    is done with the item at hand. MemoryError where memory runs out as it begins or ends.
    """
    thread = _Thread(make)

    def made() -> Iterator[Made]:
        waiting = [thread.submit(item) for item in items[:1]]
        for item in items[1:]:
            result = thread.result_of(waiting.pop())
            waiting.append(thread.submit(item))
            yield result
        if waiting:
            yield thread.result_of(waiting.pop())

    try:
        yield made()
    finally:
        thread.end()


class _Thread(Generic[Item, Made]):
    """An executor of one thread. That of `concurrent.futures` waits for ever for one that memory runs out for."""

    def __init__(self, make: Callable[[Item], Made]) -> None:
        self._make = make
        self._asked: SimpleQueue[tuple[Future[Made], Item] | None] = SimpleQueue()
        self._begun, self._ended = threading.Event(), threading.Event()
        start_thread(self._work)

    def submit(self, item: Item) -> Future[Made]:
        future: Future[Made] = Future()
        self._asked.put((future, item))
        return future

    def result_of(self, future: Future[Made]) -> Made:
        if not self._begun.wait(BEGIN_S):
            raise MemoryError(f"a thread has not begun within {BEGIN_S:g} s")
        while not wait([future], LOOK_S).done:
            if self._ended.is_set() and not future.done():
                raise MemoryError("a thread has ended before its work was done")
        return future.result()

    def end(self) -> None:
        self._asked.put(None)
        if self._begun.is_set():
            self._ended.wait()

    def _work(self) -> None:
        self._begun.set()
        try:
            while (job := self._asked.get()) is not None:
                future, item = job
                try:
                    future.set_result(self._make(item))
                except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
                    future.set_exception(error)
                del job, future, item
        finally:
            self._ended.set()
