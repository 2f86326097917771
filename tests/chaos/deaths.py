"""Which processes have ended, and whether a fault has ended them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

KINDS = ("actor", "engine", "learner")
LOOK_S = 0.5


class Deaths:
    """Is told of each process that a fault ends or may end (`expect`), and looks who is gone (`look`)."""

    def __init__(
        self, members: Callable[[str], Mapping[int, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`members`: of a kind, slot -> process id of what runs."""
        self.unexplained: list[str] = []
        self.explained = 0
        self._members, self._clock = members, clock
        self._known: dict[tuple[str, int], int] = {}
        self._expected: dict[int, float] = {}  # until when, by process id
        self._began, self._next_look = clock(), -math.inf

    def expect(self, pids: Iterable[int], within_s: float = math.inf) -> None:
        self._expected |= dict.fromkeys(pids, self._clock() + within_s)

    def look(self) -> None:
        """Looks once in `LOOK_S`."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        running = {(kind, slot): pid for kind in KINDS for slot, pid in self._members(kind).items()}
        for (kind, slot), pid in self._known.items():
            if running.get((kind, slot)) == pid:
                continue
            if self._expected.get(pid, -math.inf) >= now - LOOK_S:
                self.explained += 1
            else:
                self.unexplained.append(f"{kind} {slot} (process {pid}) after {now - self._began:.0f} s")
        self._known = running
