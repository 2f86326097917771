"""Backend and time limit of the process group over which weights are sent, which both ends must agree on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Torch reads it when a group is made."""

_LOCK = threading.Lock()  # of the environment variable

FIRST_BYTES = 8
"""Bytes of the first broadcast, with which NCCL connects a group's members; it is part of joining."""

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Where a backend's tensors lie: it takes no others."""


def backend_of(learner: str, engine: str, *, shared: bool) -> str:
    """Return the backend that sends weights from a `learner` to an `engine` on these devices ("cpu" or "cuda"). NCCL
    has no CPU ranks and cannot join two processes on one GPU: if either end is on a CPU, or they have a `shared` GPU,
    weights go through the host's memory with gloo."""
    return "nccl" if learner == engine == "cuda" and not shared else "gloo"


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Let groups of NCCL that are made meanwhile be without torch's watchdog. It would end the process a minute after a
    wait has passed its limit, since that wait aborts the group's communicator and the watchdog finds it broken."""
    with _LOCK:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


def watchdog_s(timeout_s: float) -> float:
    """Return the limit of NCCL's watchdog for a group whose users wait at most `timeout_s`. It is far longer, because
    torch ends the process when it passes: the waiting side gives up first and destroys the group."""
    return max(3600.0, 10 * timeout_s)
