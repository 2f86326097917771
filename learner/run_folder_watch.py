"""Notices that a run's folder was moved or deleted while the run writes into it."""

from __future__ import annotations

import time
from pathlib import Path

LOCK = "learner.lock"  # in the run's folder, locked by its learner
PATIENCE_S = 1.0  # a network's file system may err for a moment


class RunFolderWatch:
    """Remembers which folder, and which lock, stood at a path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths = [folder, *([folder / LOCK] if (folder / LOCK).exists() else [])]
        self._identities = [_identity(path) for path in self._paths]

    def check(self) -> None:
        """Raise ValueError if something else stands there now, or nothing: what is written would be scattered, and a
        second learner could take the folder."""
        if self._is_there():
            return
        time.sleep(PATIENCE_S)
        if not self._is_there():
            raise ValueError(
                f"the run folder {self._folder} was moved or deleted while the run was training; move it back and "
                "start the run again, which goes on from its last checkpoint"
            )

    def _is_there(self) -> bool:
        return [_identity(path) for path in self._paths] == self._identities


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the numbers of a file's device and of the file; None if there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino
