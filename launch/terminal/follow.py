"""Follows files of JSON lines that a running process appends to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class Tail:
    """Of the objects in a file those that are new, each once; a damaged line is left out."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        """What an earlier run wrote is left out: up to its end where the run is `resumed`, else the whole file, which
        the learner moves aside."""
        self._path = path
        self._file: TextIO | None = None
        self._skip = path.stat().st_size if path.exists() and resumed else 0
        self._aside = path.stat().st_ino if path.exists() and not resumed else 0
        self._line = ""

    def new(self) -> Iterator[dict[str, Any]]:
        if self._file is None and self._path.exists() and self._path.stat().st_ino != self._aside:
            self._file = self._path.open(encoding="utf-8", errors="replace")
            self._file.seek(self._skip if self._path.stat().st_size >= self._skip else 0)
        for part in self._file or ():
            self._line += part
            if not self._line.endswith("\n"):  # it is still being written
                break
            line, self._line = self._line, ""
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row
