"""Messages that were refused: counted by reason, logged once, the last ones kept as files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from logging import Logger
from pathlib import Path

import msgspec

from shared.codec import Frame, WireError

KEPT_REJECTS = 20
KEPT_BYTES = 16 * 2**20


class Rejects:
    """Counts refused messages by reason, logs the first of each peer and reason, keeps the last ones as files."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._log = log
        self._logged: set[tuple[str, str]] = set()

    def add(self, key: str, error: WireError, frames: Sequence[Frame]) -> None:
        """A kept file is msgpack: {"peer", "reason", "detail", "frames"}, frames cut off after 16 MiB."""
        if (key, error.reason) not in self._logged and len(self._logged) < 1000:
            self._logged.add((key, error.reason))
            self._log.warning("rejected a message of %s: %s (further ones are only counted)", key, error)
        number = self.counts.total()
        self.counts[error.reason] += 1
        kept, room = [], KEPT_BYTES
        for frame in frames:
            kept.append(bytes(frame[:room]))
            room -= len(kept[-1])
        record = {"peer": key, "reason": error.reason, "detail": error.detail, "frames": kept}
        name = f"{number:08d}-{re.sub('[^A-Za-z0-9_.-]', '_', key)[:64]}-{error.reason}.msgpack"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_bytes(msgspec.msgpack.encode(record))
            for old in sorted(self._folder.glob("*.msgpack"))[:-KEPT_REJECTS]:
                old.unlink()
        except OSError as error_of_disk:
            self._log.warning("could not keep a rejected message: %s", error_of_disk)
