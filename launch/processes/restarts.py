"""Restarts failed children with exponential backoff: at once after a long run, and with a limit per hour."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from launch.processes.children import Child
from shared.log import get_logger

LOG = get_logger("restarts")
HOUR_S = 3600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
RAN_WELL_S = 30.0


class TooManyRestarts(Exception):
    """The child has failed more often than allowed."""


@dataclass(slots=True)
class Restarts:
    """The pauses before the restarts of one child: no pause after a long run, a doubled one after each early end; at
    most `limit` restarts within an hour."""

    limit: int
    clock: Callable[[], float] = time.monotonic
    _ends: deque[float] = field(default_factory=deque)
    _early: int = 0
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def __len__(self) -> int:
        """Return the number of ends within the last hour."""
        return len(self._ends)

    def started(self) -> None:
        self.started_at = self.clock()

    def pause_s(self) -> float:
        """Count an end; return how long to wait before the next start. Raise TooManyRestarts beyond the limit."""
        now = self.clock()
        while self._ends and self._ends[0] < now - HOUR_S:
            self._ends.popleft()
        if len(self._ends) >= self.limit:
            raise TooManyRestarts(f"after {len(self._ends)} restarts within an hour")
        self._ends.append(now)
        self._early = self._early + 1 if now - self.started_at < RAN_WELL_S else 0
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._early - 1)) if self._early else 0.0


def how_it_ended(child: Child | None) -> str:
    """Return how a child has ended, in words; "" while it runs."""
    code = None if child is None else child.process.poll()
    if code is None:
        return ""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Supervised(ABC):
    """A child process through all its restarts; `child` is None between an end and the next start."""

    def __init__(self, name: str, restarts: Restarts, setting: str) -> None:
        """Prepare to supervise one child. `setting`: the field of the recipe that limits the restarts."""
        self.name, self.restarts, self.setting = name, restarts, setting
        self.child: Child | None = None
        self.done = False  # it has ended successfully and is not restarted
        self._start_at = 0.0

    def keep_alive(self) -> None:
        """Restart the child if it has failed, after a pause. Call it repeatedly. Raise the exception that `given_up`
        returns if it has failed too often."""
        if self.child is None:
            if time.monotonic() >= self._start_at:
                self.start()
            return
        if self.done or not (failure := self.failure(self.child)):
            return
        self.child.kill()  # in case it hangs; and processes that it left behind
        try:
            pause_s = self.restarts.pause_s()
        except TooManyRestarts as error:
            raise self.given_up(f"{failure}, {error} ({self.setting})", self.child) from None
        self.child, self._start_at = None, time.monotonic() + pause_s
        LOG.warning("%s %s; starting it again in %g s%s", self.name, failure, pause_s, self.hint())

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def failure(self, child: Child) -> str:
        """Return how the child has failed, in words; "" while it runs, or if it has ended successfully."""

    @abstractmethod
    def given_up(self, failure: str, child: Child) -> Exception: ...

    def hint(self) -> str:
        """Return text for the log that may explain the failure."""
        return ""
