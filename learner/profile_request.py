"""Heed SIGUSR1, by which a person asks for a profile of this rank's next step.

Without the handler the signal would end the process, so it is set before anything heavy begins.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

FOLDER = "profiles"  # in the run's folder
_asked = False


def heed() -> None:
    """Take SIGUSR1 as a request from now on."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _note)


def take() -> bool:
    """Tell whether a profile was asked for since the last call."""
    global _asked
    asked, _asked = _asked, False
    return asked


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = True
