"""Memory of a process: give freed memory back to the system, and keep permanent objects out of garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.util.threads import start_thread

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt
LARGE_BYTES = 2**20
LARGEST_IN_HEAP = 2**25  # glibc's own limit
WAIT_S = 1.0
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's, and torch's around it
CACHED_KERNELS = "64"
_lock = threading.Lock()
_due_s = 0.0  # earliest time of the next give-back; guarded by the lock


def use_one_heap() -> None:
    """Let all threads share the main heap. Call it at the start of the process. glibc never gives back the free end of
    any further heap: tens of megabytes after other threads have read large messages."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def keep_heap() -> None:
    """Keep the free end of the heap until `give_back_memory`. Call it in a process whose every step needs the memory
    that the last one has freed, such as a learner for its messages: else the system clears the same pages again and
    again, which takes a fifth of the time of an intake."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, -1)
        libc.mallopt(_MMAP_THRESHOLD, LARGEST_IN_HEAP)  # else the call above fixes it at 128 KiB


def bound_kernel_caches() -> None:
    """Bound how many CPU kernels oneDNN and torch cache, unless the environment sets it. Call it before torch is
    imported. By default kernels for the last 1,024 shapes are cached, half a megabyte each, and a learner's batches
    always have new shapes."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, CACHED_KERNELS)


@contextmanager
def kept_for_ever() -> Iterator[None]:
    """Keep the objects that the body creates out of garbage collection for ever. For imports of torch and transformers:
    the collector would search their objects again and again, a tenth of a learner's start time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def give_back_memory() -> None:
    """Give the free memory of all heaps back to the system; no effect if the allocator does not support it. Takes some
    milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_soon(num_bytes: int) -> None:
    """Give free memory back a second from now, if `num_bytes`, the size of something just used, is large. Any thread
    may call it as often as it likes; memory is given back at most once a second."""
    if num_bytes < LARGE_BYTES:
        return
    global _due_s
    now = time.monotonic()
    with _lock:
        if now < _due_s:
            return
        _due_s = now + WAIT_S
    with suppress(RuntimeError, MemoryError):  # no thread can be started now; a later call will do it
        start_thread(_give_back)


def _give_back() -> None:
    time.sleep(WAIT_S)
    give_back_memory()
