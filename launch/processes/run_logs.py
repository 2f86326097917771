"""Copies the stderr of a run's processes to files in the run's folder, and passes it on at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.log import get_logger

FOLDER = "logs"
MAX_BYTES = 16 << 20  # limit of a file; then it is renamed to NAME.1.log, replacing an older one
MAX_EARLY_BYTES = 1 << 20  # output kept in memory until the run's folder is ready
MAX_LINE_BYTES = 1 << 16
DRAIN_S = 2.0


class RunLogs:
    """The logs of one run. The run's folder is ready when its learner has written `recipe.json`; earlier output is
    written to the files then. If the disk cannot be written, the files are lost, but output is still passed on."""

    def __init__(self, run: Path) -> None:
        self._run, self._before = run, _written(run)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        """Read the remaining output of ended processes; wait at most `DRAIN_S` for processes that still run."""
        for thread in self._threads:
            thread.join(DRAIN_S)

    @contextlib.contextmanager
    def stderr(self, name: str) -> Iterator[int]:
        """Yield a file descriptor for a process to be started in the body; its output is also written to
        logs/NAME.log."""
        reading, writing = os.pipe()
        file = LogFile(self._run / FOLDER / f"{name}.log")
        thread = threading.Thread(target=self._pass_on, args=(reading, file), name=f"log of {name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        try:
            yield writing
        finally:
            os.close(writing)

    def _pass_on(self, reading: int, file: LogFile) -> None:
        """Pass output on in whole lines, so that lines of two processes do not mix."""
        waiting, early = b"", b""
        while part := os.read(reading, MAX_LINE_BYTES):
            lines, end, waiting = (waiting + part).rpartition(b"\n")
            if len(waiting) > MAX_LINE_BYTES:
                lines, waiting = lines + end + waiting, b""
            early = self._take(lines + end, early, file)
        self._take(waiting, early, file)
        os.close(reading)
        file.close()

    def _take(self, text: bytes, early: bytes, file: LogFile) -> bytes:
        """Pass `text` on, and write it to the file if the run's folder is ready; return what is still to be written to
        the file."""
        _write(2, text)
        early += text
        if early and _written(self._run) not in (0, self._before):
            self._before = -1  # from here on the folder is this run's
            file.add(early)
            return b""
        return early[-MAX_EARLY_BYTES:]


class LogFile:
    """Appends to the file `path`, readable only by its owner."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._fd = -1
        self._size = 0
        self._refused = False

    def add(self, text: bytes) -> None:
        if self._refused:
            return
        try:
            if self._fd < 0 or self._size > self._max_bytes:
                self._open()
            _write_all(self._fd, text)
            self._size += len(text)
        except OSError as error:
            self._refused = True
            get_logger("local").warning("%s is not written any more: %s", self._path, error.strerror)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        self.close()
        if self._size > self._max_bytes:
            os.replace(self._path, before(self._path))
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size


def before(path: Path) -> Path:
    """Return the path of the earlier part of a log that became too long."""
    return path.with_suffix(".1.log")


def bound_log(path: Path, max_bytes: int = MAX_BYTES) -> None:
    """Bound a log to which another process appends: when it is too long, copy its content to `before(path)` and
    truncate it. A line written meanwhile may be lost."""
    if not path.exists() or path.stat().st_size <= max_bytes:
        return
    try:
        with path.open("rb") as full, open(before(path), "wb", opener=_of_its_owner) as copy:
            shutil.copyfileobj(full, copy)
    except OSError as error:
        get_logger("local").warning("what %s held is not kept: %s", path, error.strerror)
    os.truncate(path, 0)


def _of_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _written(run: Path) -> int:
    """Return when the run's recipe.json was written, in nanoseconds; 0 if there is none."""
    with contextlib.suppress(OSError):
        return (run / "recipe.json").stat().st_mtime_ns
    return 0


def _write(fd: int, text: bytes) -> None:
    """Write to a file descriptor whose reader may be gone."""
    with contextlib.suppress(OSError):
        _write_all(fd, text)


def _write_all(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]
