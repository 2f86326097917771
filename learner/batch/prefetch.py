"""Prefetch of microbatches: a thread packs the next one while the device computes the current one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from learner.batch.episodes import TrainingEpisode
from learner.batch.microbatch import Microbatch
from learner.batch.to_device import on
from shared.spans import span
from shared.util.threads import BEGIN_S, start_thread

Item = TypeVar("Item")
Made = TypeVar("Made")
LOOK_S = 1.0


@contextmanager
def prefetch(
    pack: Callable[[list[TrainingEpisode]], Microbatch],
    microbatches: Sequence[list[TrainingEpisode]],
    device: torch.device,
) -> Iterator[Iterator[Microbatch]]:
    """Yield an iterator over packed microbatches on `device`; a thread packs the next one while one is in use."""

    def traced_pack(episodes: list[TrainingEpisode]) -> Microbatch:
        with span("pack", track="packing"):
            return pack(episodes)

    with ahead(traced_pack, microbatches) as packed:
        yield (on(batch, device) for batch in packed)


@contextmanager
def ahead(function: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Iterator[Made]]:
    """Yield an iterator over `function` of each item, in order; a thread computes one result ahead.

    An error of `function` is raised when its result is requested. The thread ends with the context, at the latest after
    its current item. Raise MemoryError if memory runs out when the thread starts or ends.
    """
    thread = OneThread(function)

    def results() -> Iterator[Made]:
        waiting = [thread.submit(item) for item in items[:1]]
        for item in items[1:]:
            result = thread.result_of(waiting.pop())
            waiting.append(thread.submit(item))
            yield result
        if waiting:
            yield thread.result_of(waiting.pop())

    try:
        yield results()
    finally:
        thread.end()


class OneThread(Generic[Item, Made]):
    """An executor with one thread. Unlike that of `concurrent.futures`, it does not wait forever for a thread that
    could not start for lack of memory."""

    def __init__(self, function: Callable[[Item], Made]) -> None:
        self._function = function
        self._jobs: SimpleQueue[tuple[Future[Made], Item] | None] = SimpleQueue()
        self._begun, self._ended = threading.Event(), threading.Event()
        start_thread(self._work)

    def submit(self, item: Item) -> Future[Made]:
        future: Future[Made] = Future()
        self._jobs.put((future, item))
        return future

    def result_of(self, future: Future[Made]) -> Made:
        if not self._begun.wait(BEGIN_S):
            raise MemoryError(f"a thread has not begun within {BEGIN_S:g} s")
        while not wait([future], LOOK_S).done:
            if self._ended.is_set() and not future.done():
                raise MemoryError("a thread has ended before its work was done")
        return future.result()

    def end(self) -> None:
        self._jobs.put(None)
        if self._begun.is_set():
            self._ended.wait()

    def _work(self) -> None:
        self._begun.set()
        try:
            while (job := self._jobs.get()) is not None:
                future, item = job
                try:
                    future.set_result(self._function(item))
                except BaseException as error:  # noqa: BLE001 - raised where the result is requested
                    future.set_exception(error)
                del job, future, item
        finally:
            self._ended.set()
