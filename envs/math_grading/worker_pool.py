"""A few worker processes that can be killed: a call returns its result or fails after a time limit.

The limit is one of processor time, which the process itself keeps, so that a busy machine turns no good answer into a
timeout; beyond WALL_FACTOR times the limit on the clock the process is killed from here.
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
import threading
import time
from pathlib import Path
from typing import Any

START_LIMIT_S = 60.0
WALL_FACTOR = 10.0
ROOT = Path(__file__).resolve().parents[2]


class WorkerTimeout(TimeoutError):
    """The call took longer than its limit; the process that computed it has been killed."""


class WorkerFailed(RuntimeError):
    """The process died during the call, or could not be started; the message says why."""


class WorkerPool:
    """Runs `module.handle(request) -> result` (both JSON) in up to `size` processes; may be called from any thread."""

    def __init__(self, module: str, size: int) -> None:
        self.module = module
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(_Worker(module))
        atexit.register(self.close)

    def call(self, request: Any, limit_s: float) -> Any:
        """The result; WorkerTimeout or WorkerFailed otherwise. Waiting for a free process is not counted."""
        worker = self._idle.get()
        try:
            return worker.call(request, limit_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all idle processes; a later call starts them again."""
        workers = []
        while not self._idle.empty():
            workers.append(self._idle.get_nowait())
        for worker in workers:
            worker.kill()
            self._idle.put(worker)


class _Worker:
    """One process, started at the first call and again after it was killed."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def call(self, request: Any, limit_s: float) -> Any:
        with self.lock:
            process = self.process or self.start()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([limit_s, request]).encode() + b"\n")
                process.stdin.flush()
                return json.loads(self.read(process, WALL_FACTOR * limit_s))
            except TimeoutError:
                self.kill()
                raise WorkerTimeout(f"no result within {limit_s:g} s") from None
            except (OSError, EOFError) as error:
                self.kill()
                if process.returncode == -signal.SIGPROF:
                    raise WorkerTimeout(f"no result within {limit_s:g} s") from None
                raise WorkerFailed(f"the worker died: {error}") from error

    def start(self) -> subprocess.Popen[bytes]:
        """A new process that has said that it is ready."""
        module = "envs.math_grading.worker_main"
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {module} import main; main({self.module!r})"
        self.process = process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            self.read(process, START_LIMIT_S)
        except (TimeoutError, EOFError) as error:
            self.kill()
            raise WorkerFailed(f"the worker of {self.module} did not start: {error}") from error
        return process

    @staticmethod
    def read(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        """One line of the process; TimeoutError after `limit_s`, EOFError if it ended."""
        assert process.stdout is not None
        deadline, line = time.monotonic() + limit_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {limit_s:g} s")
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError(f"exit status {process.wait()}")
                line += chunk
        return line

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # a request that was never read is lost with the process
                    stream.close()
