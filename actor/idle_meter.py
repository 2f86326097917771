"""How much of its time an actor plays nothing."""

from __future__ import annotations

import time


class IdleMeter:
    """The share of time in which no group was being played; entered once for each group."""

    def __init__(self) -> None:
        self._playing, self._idle_s = 0, 0.0
        self._since = self._began = time.monotonic()

    def __enter__(self) -> None:
        self._advance()
        self._playing += 1

    def __exit__(self, *_: object) -> None:
        self._advance()
        self._playing -= 1

    def _advance(self) -> None:
        now = time.monotonic()
        if not self._playing:
            self._idle_s += now - self._since
        self._since = now

    def read(self) -> float:
        """The share since the last read, 0..1."""
        self._advance()
        span, idle_s = self._since - self._began, self._idle_s
        self._began, self._idle_s = self._since, 0.0
        return min(1.0, idle_s / span) if span > 0 else 1.0
