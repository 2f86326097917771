"""Counts and logs refused messages: one log line a minute for each reason; the last messages are kept as files."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from logging import Logger
from pathlib import Path

import msgspec

from shared.util.process_memory import give_back_soon

LOG_EVERY_S = 60.0
KEPT_FILES = 20
KEPT_BYTES = 16 * 2**20
KEPT_EVERY_S = 10.0  # at most `KEPT_FILES` files are written in this time


class Refusals:
    """Counts and logs refusals. `what` names one refused thing in the log, such as "a message"; without a folder no
    files are kept."""

    def __init__(
        self, what: str, log: Logger, folder: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._what = what
        self._log = log
        self._folder = folder
        self._clock = clock
        self._logged: dict[str, float] = {}  # when the last line of each reason was written
        self._kept_at = [float("-inf")] * KEPT_FILES  # when the last files were written
        files = sorted(folder.glob("*.msgpack")) if folder is not None else []
        self._number = max((_file_number(path) for path in files), default=-1) + 1

    def add(
        self,
        source: str,
        reason: str,
        detail: str,
        frames: Sequence[bytes | memoryview] = (),
        failure: BaseException | None = None,
    ) -> None:
        """Record a refusal: `reason` is a short fixed word, `source` the sender, `frames` the refused data; the log
        line includes the traceback of `failure`.

        A kept file is msgpack: {"peer", "reason", "detail", "frames"}, frames cut off after 16 MiB.
        """
        self.counts[reason] += 1
        give_back_soon(sum(map(len, frames)))
        path = self._keep(source, reason, detail, frames)
        now = self._clock()
        if now - self._logged.get(reason, float("-inf")) < LOG_EVERY_S:
            return
        self._logged[reason] = now
        suffix = f"; kept as {path}" if path else ""
        line = "rejected %s of %s: %s: %s (%d for this reason so far, no further line for a minute%s)"
        self._log.warning(
            line, self._what, source[:100], reason, detail[:500], self.counts[reason], suffix, exc_info=failure
        )

    def _keep(self, source: str, reason: str, detail: str, frames: Sequence[bytes | memoryview]) -> Path | None:
        now = self._clock()
        if self._folder is None or now - self._kept_at[self._number % KEPT_FILES] < KEPT_EVERY_S:
            return None
        written: list[bytes] = []
        room = KEPT_BYTES
        for frame in frames:
            if room <= 0:
                break
            written.append(bytes(frame[:room]))
            room -= len(written[-1]) + 1
        record = {"peer": source, "reason": reason, "detail": detail, "frames": written}
        sender, why = (re.sub("[^A-Za-z0-9_.-]", "_", text)[:64] for text in (source, reason))
        path = self._folder / f"{self._number:08d}-{sender}-{why}.msgpack"
        self._kept_at[self._number % KEPT_FILES] = now
        self._number += 1
        try:
            self._folder.mkdir(exist_ok=True)  # not the run's folder, if that was moved away
            path.write_bytes(msgspec.msgpack.encode(record))
            for old in sorted(self._folder.glob("*.msgpack"))[:-KEPT_FILES]:
                old.unlink()
        except OSError as error:
            self._log.warning("could not keep %s that was rejected: %s", self._what, error)
            return None
        return path


def _file_number(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() and len(number) < 19 else -1
