"""Work on the host that a thread does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


@contextmanager
def ahead(make: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Iterator[Made]]:
    """`make` of each item, in their order: the next by a thread while this one is in use, and no further ahead.

    What `make` raises is raised where its result is asked for. The thread ends with the context, at the latest when it
    is done with the item at hand.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:

        def made() -> Iterator[Made]:
            waiting = [thread.submit(make, item) for item in items[:1]]
            for item in items[1:]:
                result = waiting.pop().result()
                waiting.append(thread.submit(make, item))
                yield result
            if waiting:
                yield waiting.pop().result()

        yield made()
