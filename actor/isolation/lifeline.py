"""Let the kernel end a child process when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """Let the kernel send this process the signal when its parent is gone. Only Linux supports this. If `parent`, a
    process id, is given and that process has already ended, exit at once."""
    _on_parents_death(number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def tied_to_this_process(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Return `die_with_parent` as the `preexec_fn` of a child that this process starts."""
    return partial(die_with_parent, number, os.getpid())


def may_outlive_parent() -> None:
    """Undo `die_with_parent`; call it in the child."""
    _on_parents_death(0)


def _on_parents_death(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
