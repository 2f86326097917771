"""A few worker processes that can be killed: a call returns its result or fails after a time limit.

The limit is processor time, which the worker process enforces itself, so that a busy machine does not turn good answers
into timeouts. After WALL_FACTOR times the limit on the clock, the pool kills the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

START_LIMIT_S = 60.0
WALL_FACTOR = 10.0
ROOT = Path(__file__).resolve().parents[2]


class WorkerTimeout(TimeoutError):
    """The call took longer than its limit; the process that computed it has been killed."""


class WorkerFailed(RuntimeError):
    """The worker process died during the call; the message says why."""


class WorkerPool:
    """Runs `module.handle(request) -> result` (both JSON) in up to `size` processes; may be called from any thread.

    A process is started at the first call that needs it, and again after it was killed.
    """

    def __init__(self, module: str, size: int) -> None:
        self.module = module
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        atexit.register(self.close)

    def call(self, request: Any, limit_s: float) -> Any:
        """Return the result. Raise WorkerTimeout or WorkerFailed if there is none, RuntimeError if no process can be
        started. Time spent waiting for a free process does not count.
        """
        process = self._idle.get()
        try:
            if process is None or process.poll() is not None:  # not started yet, or killed while it was idle
                process = self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps([limit_s, request]).encode() + b"\n")
            process.stdin.flush()
            return json.loads(_read_line(process, WALL_FACTOR * limit_s))
        except (OSError, EOFError) as error:  # a TimeoutError is an OSError
            status, process = _kill(process), None
            if isinstance(error, TimeoutError) or status == -signal.SIGPROF:
                raise WorkerTimeout(f"no result within {limit_s:g} s") from None
            raise WorkerFailed(f"the worker died: {error}") from error
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Kill all idle processes; a later call starts them again."""
        processes = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        for process in processes:
            _kill(process)
            self._idle.put(None)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process and wait until it reports that it is ready."""
        module = "envs.math_grading.worker_main"
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {module} import main; main({self.module!r})"
        process = None
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            _read_line(process, START_LIMIT_S)
        except (OSError, EOFError) as error:
            _kill(process)
            raise RuntimeError(f"the worker of {self.module} did not start: {error}") from error
        return process


def _read_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Return the next line that the process writes. Raise TimeoutError after `limit_s`, EOFError if the process
    ended."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError(f"exit status {process.wait()}")
    return line


def _kill(process: subprocess.Popen[bytes] | None) -> int | None:
    """Kill the process and return its exit status."""
    if process is None:
        return None
    with contextlib.suppress(OSError), process:  # closing fails if a request was never read
        process.kill()
    return process.returncode
