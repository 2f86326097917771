"""ledger.jsonl: which tickets each step trained on, and the name of the weights that were published last.

A step that stands there again has undone its earlier lines and all that followed them. What the disk refuses is kept,
and goes out with the next line; a checkpoint holds it too, so that a learner that resumes from it misses nothing.
A kill can cut the last line off: whoever writes next begins a new one, and readers pass over what is no line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.log import get_logger


class Ledger:
    def __init__(self, path: Path, unwritten: Iterable[str] = ()) -> None:
        """`unwritten`: the `state` of the ledger of which this one is the continuation."""
        self._path = path
        self._unwritten = list(unwritten)
        self._unsynced: list[str] = []  # written, but lost if the machine loses its power
        self._log = get_logger("learner")

    def enter(self, step: int, tickets: Sequence[int], weights: str) -> None:
        self._unwritten.append(json.dumps({"step": step, "tickets": list(tickets), "weights": weights}) + "\n")
        if error := self._write():
            self._log.error("the ledger lacks step %d until the disk takes it: %s", step, error)

    def state(self) -> list[str]:
        """The lines that the disk does not hold for certain; as JSON values. So a checkpoint and the disk together have
        every step before it, whatever happens to the machine."""
        self._write(sync=True)
        return self._unsynced + self._unwritten

    def _write(self, *, sync: bool = False) -> OSError | None:
        if not (self._unwritten or (sync and self._unsynced)):
            return None
        try:
            with self._path.open("ab") as ledger:
                ledger.write(b"\n" * self._is_torn() + "".join(self._unwritten).encode())
                ledger.flush()
                self._unsynced += self._unwritten
                self._unwritten = []
                if sync:
                    os.fsync(ledger.fileno())
                    self._unsynced = []
        except OSError as error:
            return error
        return None

    def _is_torn(self) -> bool:
        """Whether the last line has no end: whoever wrote it was killed, or the disk was full."""
        if not self._path.stat().st_size:
            return False
        with self._path.open("rb") as ledger:
            ledger.seek(-1, os.SEEK_END)
            return ledger.read(1) != b"\n"
