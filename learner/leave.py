"""How a learner goes before its run is complete: SIGTERM and SIGINT let it end its step, write a checkpoint and leave.

After SIGTERM, and after a failure that torchrun answers with a restart, actors hear nothing: they keep their groups and
wait for the learner to return. After SIGINT, and after any other failure, they are told to stop.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from shared.log import get_logger
from shared.types import Stop

EXIT_LATE = 1


class Left(Exception):
    """The learner was asked to leave, and has written its checkpoint."""


class Leave:
    """While entered, notes the first SIGTERM or SIGINT; who has not left it `within_s` later is ended."""

    def __init__(self, within_s: float) -> None:
        self.signal: signal.Signals | None = None
        self._within_s = within_s
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None

    def __bool__(self) -> bool:
        """Whether it was asked for."""
        return self.signal is not None

    def __enter__(self) -> Leave:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self else handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._timer = threading.Timer(self._within_s, self._too_late)
            self._timer.daemon = True
            self._timer.start()

    def _too_late(self) -> None:
        get_logger("learner").error("not gone within learner.leave_timeout_s = %g; ending at once", self._within_s)
        os._exit(EXIT_LATE)

    def farewell(self, *, complete: bool) -> Stop | None:
        """What to tell the actors; None = they are to wait."""
        if complete:
            return Stop("the run is complete")
        if self.signal is signal.SIGTERM or (self.signal is None and restarts_left()):
            return None
        return Stop(f"the learner was stopped by {self.signal.name}" if self.signal else "the learner failed", True)


def restarts_left() -> bool:
    """Whether torchrun starts the ranks again when they fail."""
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return done < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
