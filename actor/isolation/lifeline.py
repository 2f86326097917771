"""A process that does not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """In a child: the kernel sends it this signal when its parent is gone. Only Linux offers that. A child whose
    `parent`, a process id, has ended before that ends at once."""
    _on_parents_death(number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def tied_to_this_process(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """`die_with_parent` as the `preexec_fn` of a child that this process starts."""
    return partial(die_with_parent, number, os.getpid())


def may_outlive_parent() -> None:
    """In a child: takes `die_with_parent` back."""
    _on_parents_death(0)


def _on_parents_death(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
