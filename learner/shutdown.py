"""The end of a learner before its run is complete: at SIGTERM or SIGINT it finishes its step, writes a checkpoint and
exits.

If the last checkpoint is still being evaluated, the learner writes no new one, and the run resumes from that one.

After SIGTERM, and after a failure that torchrun answers with a restart, actors are sent nothing: they keep their groups
and wait for the learner to return. After SIGINT, and after any other failure, they are told to stop.

A separate thread counts the time: a rank that waits in a collective for a dead rank runs no Python signal handler.
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
PROGRESS_S = 5.0  # a checkpoint that is being written makes progress within this time


class ShutdownRequested(Exception):
    """The learner was asked to shut down, and has written its checkpoint."""


class Shutdown:
    """A context in which the first SIGTERM or SIGINT sets `requested`.

    If the process still runs `within_s` later, it is ended as soon as it is not writing a checkpoint or that writing
    makes no progress. `requested` is set by a signal handler, so the main thread may read it but never wait for it.
    """

    def __init__(self, within_s: float) -> None:
        self.requested = threading.Event()
        self.signal: signal.Signals | None = None
        self._within_s = within_s
        self._limit_s = min(EARLY_S, within_s)
        self._before: dict[signal.Signals, Any] = {}
        self._guarded = False
        self._progress: Callable[[], object] = lambda: None

    def guard(self) -> None:
        """Start the thread that ends the process in time after a signal. Until the context is entered the limit is
        `EARLY_S`, since there is nothing to save."""
        if self._guarded or threading.current_thread() is not threading.main_thread():
            return
        self._guarded = True
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(receiver,), name="shutdown", daemon=True).start()

    def watch_progress(self, progress: Callable[[], object]) -> None:
        """Set the progress of saving, for which the end of the process waits: `progress` returns a new value as long as
        saving goes on."""
        self._progress = progress

    def __enter__(self) -> Shutdown:
        self.guard()
        self._limit_s = self._within_s
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._request) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # No SIG_IGN: Python prints a traceback where a signal that has arrived meets it.
            signal.signal(number, self._request if self.requested.is_set() else handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self.requested.set()

    def _watch(self, receiver: socket.socket) -> None:
        """Wait for a signal, and end the process when its time is up. The signal's number arrives here through the
        wakeup socket, whatever the main thread is doing."""
        while receiver.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        limit_s = self._limit_s
        time.sleep(limit_s)
        seen, now = None, self._progress()
        while now != seen:
            get_logger("learner").warning("a checkpoint is still being written after %g s: waiting for it", limit_s)
            time.sleep(PROGRESS_S)
            seen, now = now, self._progress()
        limit = "learner.leave_timeout_s =" if limit_s == self._within_s else "the seconds that a start has:"
        get_logger("learner").error("not gone within %s %g; ending at once", limit, limit_s)
        os._exit(EXIT_LATE)

    def stop_message(self, *, complete: bool) -> Stop | None:
        """Return the message to the actors; None if they should wait for this learner's return."""
        if complete:
            return Stop("the run is complete")
        if self.signal is signal.SIGTERM or (self.signal is None and restarts_left()):
            return None
        return Stop(f"the learner was stopped by {self.signal.name}" if self.signal else "the learner failed", True)


def restarts_left() -> bool:
    """Tell whether torchrun starts the ranks again when they fail."""
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return done < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
