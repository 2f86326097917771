"""Starts child processes, watches them, and ends them: each by its own pid, and without leaving any behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from actor.isolation.lifeline import tied_to_this_process
from shared.log import get_logger

ROOT = Path(__file__).resolve().parents[2]
TERMINATE_S = 6.0
KILLED_S = 60.0
log = logging.getLogger(__name__)
EXIT_STOPPED = 130
LARGE = str(8 * 2**30)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_arrived: list[str] = []  # the names of the signals that `raise_on_signals` has seen


def cpu_env(threads: int) -> dict[str, str]:
    """Return the environment of a process that computes on the CPU: idle threads sleep, and glibc keeps freed tensors
    instead of returning them to the kernel, whose page faults cost a fifth of a training step."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_MMAP_THRESHOLD_": LARGE,
        "MALLOC_TRIM_THRESHOLD_": LARGE,
    }


@dataclass(slots=True)
class Child:
    """One child process."""

    name: str
    process: subprocess.Popen[bytes]
    family: bool = False  # it leads its own process group, which is ended with it
    leave_s: float | None = None  # seconds between SIGTERM and SIGKILL; None = TERMINATE_S

    def kill(self) -> None:
        """Send SIGKILL, to the whole process group if it is a family, and reap the child, unless the kernel does not
        end it."""
        if self.family:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        try:
            self.process.wait(KILLED_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel, such as in a hanging GPU driver
            message = (
                "%s (pid %d) has not ended %.0f s after SIGKILL and is left behind, with its memory: reboot this host"
            )
            log.error(message, self.name, self.process.pid, KILLED_S)


def module_path() -> str:
    """Return the PYTHONPATH for Pronk's processes: the repository, then the user's own PYTHONPATH."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def start(
    name: str,
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    mute: bool = False,
    stdout: int | None = None,
    stderr: int | None = None,
    leave_s: float | None = None,
) -> Child:
    """Start `command` without a shell. `mute` discards its stdout; `stdout` and `stderr` are file descriptors for these
    (default: this process's own), or subprocess.PIPE; `leave_s` is as in `Child`. On Linux the kernel ends the child
    when its parent dies."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": module_path(), **(env or {})},
        stdout=subprocess.DEVNULL if mute else stdout,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child: each gets one signal
        preexec_fn=tied_to_this_process(),
    )
    return Child(name, process, leave_s=leave_s)


def start_family(name: str, command: Sequence[str], log: Path, *, env: dict[str, str], fresh: bool = True) -> Child:
    """Start a server that starts further processes: in a process group that `Child.kill` ends as a whole, with `log`'s
    folder as the working directory. Its output goes to `log`, readable only by its owner; it is appended unless
    `fresh`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        log.write_bytes(b"")
    with log.open("ab") as output:  # append mode, since the file may be truncated meanwhile
        os.fchmod(output.fileno(), 0o600)  # SGLang writes its API key into it
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=tied_to_this_process(signal.SIGKILL),
        )
    return Child(name, process, family=True)


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM has arrived. It is a KeyboardInterrupt because it may be raised anywhere, even in an import,
    where code may catch every `Exception` (Python's own compiler does), but lets a KeyboardInterrupt through."""


def raise_on_signals() -> None:
    """Let the first SIGINT or SIGTERM from here on, or one that was blocked and has arrived before, raise `Stopped` in
    the main thread; ignore further ones."""

    def handler(number: int, _frame: object) -> None:
        ignore_signals()
        _arrived.append(signal.Signals(number).name)
        raise Stopped(_arrived[0])

    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def raise_if_stopped() -> None:
    """Raise `Stopped` if a signal has arrived whose own `Stopped` was lost: Python drops an exception that is raised in
    a finalizer. For loops that wait."""
    if _arrived:
        raise Stopped(_arrived[0])


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM from here on. By a handler that does nothing: Python prints a traceback where a signal
    that has arrived meets SIG_IGN. A process that ignores them ends by `exit_at_once`."""
    for number in STOP_SIGNALS:
        signal.signal(number, _do_nothing)


def _do_nothing(_number: int, _frame: object) -> None:
    pass


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program's `main` in which the first signal raises `Stopped`, and exit with the code that it returns."""
    try:
        raise_on_signals()
        code = main()
    except Stopped as stopped:
        get_logger(Path(sys.argv[0]).stem).info("%s: stopping", stopped)
        code = EXIT_STOPPED
    exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """End the process after writing out its output, without the interpreter's own end: that restores the default
    handlers, so that a second Ctrl-C would end it by the signal, and threads inside torch would abort it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def wait_for_any(children: Sequence[Child], tick: Callable[[], None]) -> Child:
    """Return the first child that has ended; call `tick` meanwhile."""
    while True:
        for child in children:
            if child.process.poll() is not None:
                return child
        tick()
        raise_if_stopped()
        time.sleep(0.2)


def stop_all(children: Sequence[Child], *, last: bool = True) -> None:
    """Send SIGTERM to all children that still run, SIGKILL to those that do not end in time, and reap them. Signals are
    ignored from here on, since the process is ending anyway. If these children are not the `last`, a signal is raised
    as `Stopped` after all of them have ended.
    """
    if last:
        ignore_signals()
    try:
        _end(children)
    except Stopped:
        _end(children)
        raise


def _end(children: Sequence[Child]) -> None:
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.process.send_signal(signal.SIGTERM)
    since = time.monotonic()
    limits = [(TERMINATE_S if child.leave_s is None else child.leave_s, child) for child in running]
    for limit_s, child in sorted(limits, key=lambda each: each[0]):
        try:
            child.process.wait(max(0.0, since + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
    for child in children:
        if child.family:
            child.kill()  # processes that its leader has left behind
