"""Follows files of JSON lines that a running process appends to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class Tail:
    """Reads the new objects in a file, each once; damaged lines are skipped."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        """Skip what an earlier run has written: if the run is `resumed`, the present content of the file; else the
        whole present file, which the learner will move aside."""
        self._path = path
        self._file: TextIO | None = None
        self._skip = path.stat().st_size if path.exists() and resumed else 0
        self._aside = path.stat().st_ino if path.exists() and not resumed else 0
        self._line = ""
        # Rows of a file that replaces this one are new if they are younger; a file's time is a little early.
        self._seen_s = path.stat().st_mtime + 0.1 if path.exists() else 0.0

    def new(self) -> Iterator[dict[str, Any]]:
        if self._file is None and self._path.exists() and self._path.stat().st_ino != self._aside:
            self._file = self._path.open(encoding="utf-8", errors="replace")
            self._file.seek(self._skip if self._path.stat().st_size >= self._skip else 0)
        is_new = self._reopen()
        for part in self._file or ():
            self._line += part
            if not self._line.endswith("\n"):  # the line is still being written
                break
            line, self._line = self._line, ""
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and not (is_new and _time_of(row) <= self._seen_s):
                self._seen_s = max(self._seen_s, _time_of(row))
                yield row

    def _reopen(self) -> bool:
        """Open the file again if another one has taken its name, as when a run goes back to an earlier step; tell
        whether that is so."""
        with contextlib.suppress(OSError):
            if self._file is not None and self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                self._file.close()
                self._file, self._line = self._path.open(encoding="utf-8", errors="replace"), ""
                return True
        return False


def _time_of(row: dict[str, Any]) -> float:
    """Return when a row was written, in seconds since 1970; 0 if it does not say."""
    value = row.get("time")
    return value if isinstance(value, int | float) else 0.0
