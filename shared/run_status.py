"""RUN/status.json: what a run is doing now, and how it ended. The learner writes it; terminal and dashboard read it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.redaction import redact_text

STATUS = "status.json"
EVERY_S = 1.0  # between two writes of one phase
TRAINING = "training"
ENDS = ("complete", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The phase of a run since a time (seconds since 1970), with `done` of `total` where they are known. `ended`: ""
    while it runs, or one of ENDS, with the reason in one line."""

    phase: str
    since: float
    done: int = 0
    total: int = 0
    ended: str = ""
    reason: str = ""

    def in_words(self) -> str:
        return f"{self.phase}: {self.done} of {self.total}" if self.total else self.phase


class StatusFile:
    """Writes the status of one run. A disk that cannot be written costs the status alone."""

    def __init__(self, run: Path) -> None:
        self._path = run / STATUS
        self._status = RunStatus("starting", time.time())
        self._written_s = -EVERY_S
        self._folder = self._folder_number()

    def enter(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Record the phase, at most every EVERY_S seconds as long as it stays the same."""
        is_new = phase != self._status.phase
        self._status = RunStatus(phase, time.time() if is_new else self._status.since, done, total)
        if is_new or time.monotonic() - self._written_s > EVERY_S:
            self._write()

    def end(self, how: str, reason: str = "") -> None:
        """Record how the run ended: one of ENDS, and why."""
        self._status = RunStatus(
            self._status.phase, time.time(), ended=how, reason=redact_text(" ".join(reason.split()))[:2000]
        )
        self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        partial = self._path.with_suffix(".partial")
        if self._folder_number() != self._folder:  # it was moved away, and another run may stand there
            return
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(asdict(self._status)) + "\n", encoding="utf-8")
            os.replace(partial, self._path)

    def _folder_number(self) -> int:
        try:
            return self._path.parent.stat().st_ino
        except OSError:
            return 0


def read_status(run: Path) -> RunStatus | None:
    """Return a run's status; None if there is none that can be read."""
    try:
        values = json.loads((run / STATUS).read_text(encoding="utf-8"))
        status = RunStatus(
            str(values["phase"]),
            float(values["since"]),
            int(values["done"]),
            int(values["total"]),
            str(values["ended"]),
            str(values["reason"]),
        )
    except Exception:  # noqa: BLE001 - whatever stands there, it is no status
        return None
    return status
