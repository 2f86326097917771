"""Who of the processes has ended, and how much memory the others have come to hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FIRST_MEASURED_STEP = 10
MIB = 2**20


class Watch:
    """Is shown the processes that run, by name, again and again. A name whose process is another one has died."""

    def __init__(self) -> None:
        self.dead: list[str] = []
        self._alive: Mapping[str, int] = {}
        self._base: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def look(self, processes: Mapping[str, int], step: int) -> None:
        """`processes`: name -> process id; `step`: how far training is."""
        self.dead += [name for name, pid in self._alive.items() if processes.get(name) != pid]
        self._alive = dict(processes)
        for name, pid in processes.items():
            resident = resident_bytes(pid)
            if resident and step >= FIRST_MEASURED_STEP:
                self._base.setdefault(name, resident)
                self._most[name] = max(self._most.get(name, 0), resident)

    def growth_mb(self) -> dict[str, float]:
        """From the tenth step to the most that was ever seen afterwards."""
        return {name: round((self._most[name] - base) / MIB, 1) for name, base in sorted(self._base.items())}


def resident_bytes(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
