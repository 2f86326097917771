"""A process that does not outlive its parent."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """In a child: the kernel sends it this signal when its parent is gone. Only Linux offers that."""
    _on_parents_death(number)


def may_outlive_parent() -> None:
    """In a child: takes `die_with_parent` back."""
    _on_parents_death(0)


def _on_parents_death(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
