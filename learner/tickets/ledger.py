"""ledger.jsonl: the tickets that each step trained on, and the name of the weights that were last published.

If a step occurs again, its earlier lines and all lines after them have been undone. A line that could not be written is
kept in memory and written with the next one. A checkpoint holds it too, so a learner that resumes from it loses no
line. A kill can truncate the last line: the next writer starts on a new line, and readers skip invalid lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.log import get_logger


class Ledger:
    """The ledger's file, and the lines that are not yet in it."""

    def __init__(self, path: Path, unwritten: Iterable[str] = ()) -> None:
        """Continue the ledger at `path`; `unwritten` is the `state` of the previous ledger."""
        self._path = path
        self._unwritten = list(unwritten)
        self._unsynced: list[str] = []  # written, but lost if the machine loses power
        self._log = get_logger("learner")

    def enter(self, step: int, tickets: Sequence[int], weights: str) -> None:
        """Append a step's line, now or, if the write fails, together with the next one."""
        self._unwritten.append(json.dumps({"step": step, "tickets": list(tickets), "weights": weights}) + "\n")
        if error := self._write():
            self._log.error("the ledger lacks step %d until the disk takes it: %s", step, error)

    def state(self) -> list[str]:
        """Return the lines that are not certain to be on the disk, as JSON values.

        A checkpoint with these lines and the disk together hold every step before it, even if the machine loses power.
        """
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
        """Tell whether the last line lacks its line end because its writer was killed or the disk was full."""
        if not self._path.stat().st_size:
            return False
        with self._path.open("rb") as ledger:
            ledger.seek(-1, os.SEEK_END)
            return ledger.read(1) != b"\n"
