"""ledger.jsonl: which tickets each step trained on.

A step that stands there again has undone its earlier lines and all that followed them. What the disk refuses is kept,
and goes out with the next line; a checkpoint holds it too, so that a learner that resumes from it misses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.log import get_logger


class Ledger:
    def __init__(self, path: Path, unwritten: Iterable[str] = ()) -> None:
        """`unwritten`: the `state` of the ledger of which this one is the continuation."""
        self._path = path
        self._unwritten = list(unwritten)
        self._log = get_logger("learner")

    def enter(self, step: int, tickets: Sequence[int]) -> None:
        self._unwritten.append(json.dumps({"step": step, "tickets": list(tickets)}) + "\n")
        if error := self._write():
            self._log.error("the ledger lacks step %d until the disk takes it: %s", step, error)

    def state(self) -> list[str]:
        """The lines that the disk refuses still; as JSON values."""
        self._write()
        return list(self._unwritten)

    def _write(self) -> OSError | None:
        if not self._unwritten:
            return None
        try:
            with self._path.open("a") as ledger:
                ledger.write("".join(self._unwritten))
        except OSError as error:
            self._unwritten[0] = "\n" + self._unwritten[0].lstrip()  # a part of it may be there
            return error
        self._unwritten.clear()
        return None
