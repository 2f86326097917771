"""Starts again what has ended: at once if it had run well, after growing pauses if not, and not for ever."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from launch.processes.children import Child

HOUR_S = 3600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
RAN_WELL_S = 30.0


class TooManyRestarts(Exception):
    """It has ended more often than it may."""


@dataclass(slots=True)
class Restarts:
    """Decides about one child. No pause after it ran well; after an end soon after its start one that doubles with each
    such end; `limit` ends within an hour."""

    limit: int
    clock: Callable[[], float] = time.monotonic
    _ends: deque[float] = field(default_factory=deque)
    _early: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def __len__(self) -> int:
        """Ends within the last hour."""
        return len(self._ends)

    def started(self) -> None:
        self._started = self.clock()

    def pause_s(self) -> float:
        """It has ended: how long to wait before the next start. TooManyRestarts."""
        now = self.clock()
        while self._ends and self._ends[0] < now - HOUR_S:
            self._ends.popleft()
        if len(self._ends) >= self.limit:
            raise TooManyRestarts(f"after {len(self._ends)} restarts within an hour")
        self._ends.append(now)
        self._early = self._early + 1 if now - self._started < RAN_WELL_S else 0
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._early - 1)) if self._early else 0.0


def how_it_ended(child: Child | None) -> str:
    """In words; empty while it runs."""
    code = None if child is None else child.process.poll()
    if code is None:
        return ""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
