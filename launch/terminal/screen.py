"""A live table at the bottom of a terminal, with the output of this process and its children above it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
DRAIN_S = 2.0
WIDEST = 100


def is_terminal() -> bool:
    """Tell whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _size_of(fd: int) -> os.terminal_size:
    """Return a terminal's size; 80 by 24 if it does not report one, or is gone."""
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(fd)
        if size.columns and size.lines:
            return size
    return os.terminal_size((80, 24))


class Screen:
    """A context manager that shows the table. While it is entered, output to stdout and stderr (if they are terminals),
    also from children started meanwhile, goes through a pipe and is printed above the table. If the terminal
    disappears, the process goes on."""

    def __enter__(self) -> Self:
        sys.stdout.flush()
        sys.stderr.flush()
        self._tty = os.dup(2)
        self._console = Console(
            file=os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace"),
            force_terminal=True,
            highlight=False,
        )
        self._size = self._console.size = _size_of(self._tty)
        self._saved = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
        self._content: RenderableType = ""
        self._lock = threading.RLock()  # guards the console
        reading, writing = os.pipe()
        for fd in self._saved:
            os.dup2(writing, fd)
        os.close(writing)
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=False
        )
        with contextlib.suppress(OSError):
            self._live.start()
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), name="terminal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        """Leave the last table on the screen; later output comes below it."""
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        self._thread.join(DRAIN_S)  # ends when all children have closed the pipe
        with self._lock, contextlib.suppress(OSError):
            self._live.stop()
        os.close(self._tty)

    @property
    def width(self) -> int:
        return min(self._size.columns, WIDEST)

    @property
    def resized(self) -> bool:
        return _size_of(self._tty) != self._size

    def update(self, content: RenderableType) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self.resized:
                self._resize(_size_of(self._tty))
            self._content = content
            self._live.update(content, refresh=True)

    def _resize(self, size: os.terminal_size) -> None:
        """Erase the table as the resized terminal shows it, with lines folded that no longer fit; `Live` only knows the
        number of lines before."""
        lines = self._console.render_lines(self._content, pad=False)
        folded = sum(-(-max(1, Segment.get_line_length(line)) // size.columns) for line in lines)
        self._console.file.write("\r\x1b[2K" + "\x1b[1A\x1b[2K" * (folded - 1) + "\n" * (len(lines) - 1))
        self._size = self._console.size = size

    def _pass_on(self, reading: int) -> None:
        with os.fdopen(reading, "r", encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                # Of a progress bar that is redrawn in place, keep the last state.
                text = _ESCAPES.sub("", line.rstrip("\r\n").rpartition("\r")[2])
                with self._lock, contextlib.suppress(OSError):
                    self._console.print(Text(text), soft_wrap=True)
