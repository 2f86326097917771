"""Who of the processes has ended, and how much memory the others have come to hold."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

FIRST_MEASURED_STEP = 10
LAST = 20  # looks whose median counts as what a process holds at the end
MIB = 2**20


class Watch:
    """Is shown the processes that run, by name, again and again. A name whose process is another one has died."""

    def __init__(self) -> None:
        self.dead: list[str] = []
        self._alive: Mapping[str, int] = {}
        self._resident: defaultdict[str, list[int]] = defaultdict(list)  # in bytes, from the tenth step on

    def look(self, processes: Mapping[str, int], step: int) -> None:
        """`processes`: name -> process id; `step`: how far training is."""
        self.dead += [name for name, pid in self._alive.items() if processes.get(name) != pid]
        self._alive = dict(processes)
        for name, pid in processes.items():
            resident = resident_bytes(pid)
            if resident and step >= FIRST_MEASURED_STEP:
                self._resident[name].append(resident)

    def growth_mb(self) -> dict[str, float]:
        """What each process holds at the end, less what it held at the tenth step."""
        return {name: _mb(statistics.median(seen[-LAST:]) - seen[0]) for name, seen in sorted(self._resident.items())}

    def peak_mb(self) -> dict[str, float]:
        """The most that it held for a moment, less what it held at the tenth step."""
        return {name: _mb(max(seen) - seen[0]) for name, seen in sorted(self._resident.items())}


def _mb(num_bytes: float) -> float:
    return round(num_bytes / MIB, 1)


def resident_bytes(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
