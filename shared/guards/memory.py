"""What a process has freed goes back to the system, and what it keeps for ever is not searched for garbage."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.guards.threads import start_thread

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt
LARGE_BYTES = 2**20
LARGEST_IN_HEAP = 2**25  # glibc's own limit
WAIT_S = 1.0
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's, and torch's around it
KEPT_KERNELS = "64"
_lock = threading.Lock()
_due_s = 0.0  # when it next may; guarded by the lock


def use_one_heap() -> None:
    """For a process that has only begun. All threads share the main heap: glibc keeps the free end of each further one,
    tens of megabytes of large messages that were read by other threads, whatever is given back."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def keep_heap() -> None:
    """For a process that needs in each step what the last one has freed, a learner's messages: what the heap's end has
    free stays until it is given back, else the system clears the same pages over and over, a fifth of an intake's
    time."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, -1)
        libc.mallopt(_MMAP_THRESHOLD, LARGEST_IN_HEAP)  # the other call has fixed it at 128 KiB


def bound_kernel_caches() -> None:
    """For a process that has not imported torch yet, unless its environment says otherwise. Kernels of a CPU for the
    last 1,024 shapes are kept otherwise, half a megabyte each, and a learner's batches have ever new shapes."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, KEPT_KERNELS)


@contextmanager
def kept_for_ever() -> Iterator[None]:
    """What the body makes is never garbage: modules of torch and transformers, whose objects the collector would look
    through again and again while they are imported, a tenth of the time that a learner takes to start."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def give_back_memory() -> None:
    """Of all heaps of this process; where the allocator cannot, nothing happens. Takes some milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_soon(num_bytes: int) -> None:
    """Something of this size was held for a moment: if it was large, what is free a second later goes back to the
    system. For any thread; however often it is called, that happens once a second at most."""
    if num_bytes < LARGE_BYTES:
        return
    global _due_s
    now = time.monotonic()
    with _lock:
        if now < _due_s:
            return
        _due_s = now + WAIT_S
    with suppress(RuntimeError, MemoryError):  # none can be begun now; another time
        start_thread(_give_back)


def _give_back() -> None:
    time.sleep(WAIT_S)
    give_back_memory()
