"""What a worker of the tool `python` does: it runs a program in a fork of itself, which it ends at its limits."""

from __future__ import annotations

import ast
import os
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from typing import Any

MIB = 2**20
FILE_MIB = 64  # of one file that a program writes
MEMORY, FAILED = 77, 1  # exit codes


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Run `request["code"]`; return its output, at most `characters` characters of it, and how it ended: "" in time,
    else "time" or "memory"."""
    folder = tempfile.mkdtemp(prefix="pronk_python_")
    reader, writer = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _be_program(request, folder, writer)
        os.close(writer)
        try:
            output, is_late = _read(reader, 4 * request["characters"], time.monotonic() + request["limit_s"])
        finally:
            for kill in (os.killpg, os.kill):  # its process group; itself, in case it has not made the group yet
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        text = output.decode("utf-8", "replace")
        ended = "time" if is_late or code == -signal.SIGXCPU else "memory" if code == MEMORY else ""
        return {"text": text, "ended": ended}
    finally:
        os.close(reader)
        shutil.rmtree(folder, ignore_errors=True)


def _read(reader: int, most: int, deadline_s: float) -> tuple[bytes, bool]:
    """Return what the program writes, at most `most` bytes, until it ends; and whether it was still running at the
    deadline."""
    kept = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(reader, 2**16)
            if not data:
                return bytes(kept), False
            kept += data[: most - len(kept)]
    return bytes(kept), True


def _be_program(request: dict[str, Any], folder: str, writer: int) -> None:
    """Become the program; never returns."""
    status = FAILED
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.closerange(3, 1024)  # the worker's own connections
        os.chdir(folder)
        os.environ.clear()
        _limit(request["limit_s"], request["memory_mb"])
        sys.stdin = os.fdopen(0)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)  # by lines: what was written is not lost
        status = _run(request["code"])
    except MemoryError:
        status = MEMORY
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _limit(limit_s: float, memory_mb: int) -> None:
    """Limit what the program may take. It ends by itself if its worker is gone: by a timer, and by processor time."""
    seconds = int(limit_s) + 1
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, FILE_MIB * MIB),
        (resource.RLIMIT_AS, memory_mb * MIB),
    ):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 1)


def _run(code: str) -> int:
    """Run a program; print the value of its last line if that is an expression, as an interactive session does."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        body = ast.parse(code, "program")
        last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, "program", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "program", "eval"), names)
            if value is not None:
                print(repr(value))
    except MemoryError:
        raise
    except SystemExit as end:
        return 0 if not end.code else FAILED
    except BaseException as error:  # noqa: BLE001 - the program's own
        if error.__traceback__ is not None:  # without this function's frame
            error.__traceback__ = error.__traceback__.tb_next
        sys.stdout.flush()
        traceback.print_exception(error, limit=-5)
        return FAILED
    return 0
