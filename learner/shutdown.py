"""How a learner ends before its run is complete: at SIGTERM or SIGINT it ends its step, writes a checkpoint, exits.
Where the checkpoint that it has written last is still being evaluated, it leaves that one to go on from.

After SIGTERM, and after a failure that torchrun answers with a restart, actors are told nothing: they keep their groups
and wait for the learner to return. After SIGINT, and after any other failure, they are told to stop.

A thread of its own counts the time: a rank that waits in a collective for a dead one runs no signal handler in Python.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from shared.log import get_logger
from shared.types import Stop

EXIT_LATE = 1
EARLY_S = 3.0
PROGRESS_S = 5.0  # in which a checkpoint that is being written makes progress


class ShutdownRequested(Exception):
    """The learner was asked to shut down, and has written its checkpoint."""


class Shutdown:
    """While entered, the first SIGTERM or SIGINT sets `requested`; a process still there `within_s` later is ended, or
    as soon as the checkpoint that it writes by then makes no progress.

    `requested` is set by a signal handler, so the main thread may ask it but never wait for it.
    """

    def __init__(self, within_s: float) -> None:
        self.requested = threading.Event()
        self.signal: signal.Signals | None = None
        self._within_s = within_s
        self._limit_s = min(EARLY_S, within_s)
        self._before: dict[signal.Signals, Any] = {}
        self._guarded = False
        self.progress: Callable[[], object] = lambda: None  # what changes while something is still being saved

    def guard(self) -> None:
        """From here on a signal ends the process in time; within `EARLY_S` before this is entered: nothing is to
        be saved then."""
        if self._guarded or threading.current_thread() is not threading.main_thread():
            return
        self._guarded = True
        heard, told = socket.socketpair()
        told.setblocking(False)
        signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(heard,), name="shutdown", daemon=True).start()

    def __enter__(self) -> Shutdown:
        self.guard()
        self._limit_s = self._within_s
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.requested.is_set() else handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self.requested.set()

    def _watch(self, heard: socket.socket) -> None:
        """The kernel's end of the handlers writes each signal's number here, whatever the main thread is doing."""
        while heard.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        limit_s = self._limit_s
        time.sleep(limit_s)
        seen, now = None, self.progress()
        while now != seen:
            get_logger("learner").warning("a checkpoint is still being written after %g s: waiting for it", limit_s)
            time.sleep(PROGRESS_S)
            seen, now = now, self.progress()
        limit = "learner.leave_timeout_s =" if limit_s == self._within_s else "the seconds that a start has:"
        get_logger("learner").error("not gone within %s %g; ending at once", limit, limit_s)
        os._exit(EXIT_LATE)

    def farewell(self, *, complete: bool) -> Stop | None:
        """What to tell the actors; None = they are to wait for its return."""
        if complete:
            return Stop("the run is complete")
        if self.signal is signal.SIGTERM or (self.signal is None and restarts_left()):
            return None
        return Stop(f"the learner was stopped by {self.signal.name}" if self.signal else "the learner failed", True)


def restarts_left() -> bool:
    """Whether torchrun starts the ranks again when they fail."""
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return done < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
