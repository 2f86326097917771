"""Log lines that repeat: the first of each reason are written at once, later ones as a count, once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0
MAX_REASONS = 1024  # that are counted at once; the oldest is forgotten beyond


class RepeatedLines:
    """Writes lines to a log, each with a reason: a short fixed word. `flush` writes the counts that are due."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic, *, at_once: int = 1) -> None:
        """Write `at_once` lines of each reason before the others of a minute are counted."""
        self._log = log
        self._clock = clock
        self._at_once = at_once
        self._since: dict[str, tuple[float, int]] = {}  # reason -> (begin of its minute, lines written in it)
        self._more: dict[str, tuple[int, int, str]] = {}  # reason -> (level, number of lines left out, the last one)

    def add(self, level: int, reason: str, line: str) -> None:
        """Write a line, or count it if enough with this reason were written less than a minute ago."""
        now = self._clock()
        since, written = self._since.get(reason, (float("-inf"), 0))
        if now - since < EVERY_S:
            if written >= self._at_once:
                _, count, _ = self._more.get(reason, (level, 0, ""))
                self._more[reason] = (level, count + 1, line)
                return
            self._since[reason] = since, written + 1
        else:
            self._write_count(reason)
            self._since.pop(reason, None)
            self._since[reason] = now, 1
        self._log.log(level, "%s", line)
        if len(self._since) > MAX_REASONS:
            oldest = next(iter(self._since))
            self._write_count(oldest)
            del self._since[oldest]

    def flush(self, *, end: bool = False) -> None:
        """Write the counts of the lines that were left out for a minute, or at the `end` all counts."""
        now = self._clock()
        for reason in [r for r in self._more if end or now - self._since[r][0] >= EVERY_S]:
            self._write_count(reason)
            self._since[reason] = now, self._at_once

    def _write_count(self, reason: str) -> None:
        if reason in self._more:
            level, count, last = self._more.pop(reason)
            self._log.log(level, "%s", f"{count} more of {reason}, the last: {last}" if count > 1 else last)
