"""Compare the monotonic clocks of two processes.

On one host they are one clock. Another host's is asked: its answer was given between the request and the answer, so
that it is known to half the round trip; of several round trips the shortest counts.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def clock_name() -> str:
    """Return what all processes share that read the same monotonic clock, and no others: the host's boot and, on Linux,
    the namespace of time."""
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{platform.node()} {platform.system()}"


@dataclass(slots=True)
class ClockOffset:
    """What has to be added to this process's clock to get another's. Unknown until the first measurement, with an
    error of infinity."""

    add_s: float = 0.0
    error_s: float = math.inf
    _name: str = ""

    def measure(self, name: str, asked: float, theirs: float, answered: float) -> None:
        """Take in an answer of the clock `name`, which read `theirs` between our `asked` and `answered`. An answer of
        another clock than the last begins anew."""
        if name != self._name:
            self._name, self.add_s, self.error_s = name, 0.0, math.inf
        if name == clock_name():
            self.add_s, self.error_s = 0.0, 0.0
        elif math.isfinite(theirs) and 0 <= answered - asked < 2 * self.error_s:
            self.add_s, self.error_s = theirs - (asked + answered) / 2, (answered - asked) / 2
