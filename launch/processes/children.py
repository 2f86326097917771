"""Starts child processes, watches them, and ends them: each by its own pid, none left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actor.isolation.lifeline import tied_to_this_process

ROOT = Path(__file__).resolve().parents[2]
TERMINATE_S = 6.0
KILLED_S = 60.0
log = logging.getLogger(__name__)
LARGE = str(8 * 2**30)


def cpu_env(threads: int) -> dict[str, str]:
    """For a process that computes on the CPU: idle threads sleep, and glibc keeps freed tensors instead of returning
    them to the kernel, whose page faults cost a fifth of a training step."""
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
    family: bool = False  # it leads a process group of its own, which ends with it
    leave_s: float | None = None  # between SIGTERM and SIGKILL; None = TERMINATE_S

    def kill(self) -> None:
        """SIGKILL, to the whole family where there is one; and collects the child, unless the kernel holds it."""
        if self.family:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        try:
            self.process.wait(KILLED_S)
        except subprocess.TimeoutExpired:  # within a call of the kernel, as a GPU's driver that hangs
            said = (
                "%s (pid %d) has not ended %.0f s after SIGKILL and is left behind, with its memory: reboot this host"
            )
            log.error(said, self.name, self.process.pid, KILLED_S)


def module_path() -> str:
    """PYTHONPATH of a process of ours: the repository goes before what the user has put there."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def start(
    name: str,
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    mute: bool = False,
    stderr: int | None = None,
    leave_s: float | None = None,
) -> Child:
    """Starts `command` (no shell); `mute` discards its stdout, `stderr` is a file descriptor for it in place of this
    process's own; `leave_s` is the child's. The kernel of Linux ends it when its parent dies."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": module_path(), **(env or {})},
        stdout=subprocess.DEVNULL if mute else None,
        stderr=stderr,
        preexec_fn=tied_to_this_process(),
    )
    return Child(name, process, leave_s=leave_s)


def start_family(name: str, command: Sequence[str], log: Path, *, env: dict[str, str], fresh: bool = True) -> Child:
    """Starts a server that starts processes of its own: in a process group that `Child.kill` ends as a whole, outside
    the repository's folder, its output going to `log` (its owner's alone; appended unless `fresh`)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        log.write_bytes(b"")
    with log.open("ab") as output:  # whatever its place was, it goes on at the end of a file that was cut meanwhile
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
    """SIGINT or SIGTERM arrived. It may be raised in the middle of anything, an import too, and what it is raised in
    may catch each `Exception`: Python's own compiler does so, but lets a KeyboardInterrupt through."""


def raise_on_signals() -> None:
    """From here on SIGINT and SIGTERM raise `Stopped` in the main thread, once; further ones are ignored."""

    def handler(number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)


def wait_for_any(children: Sequence[Child], tick: Callable[[], None]) -> Child:
    """Returns the first child that has ended; calls `tick` meanwhile."""
    while True:
        for child in children:
            if child.process.poll() is not None:
                return child
        tick()
        time.sleep(0.2)


def stop_all(children: Sequence[Child], *, last: bool = True) -> None:
    """SIGTERM to all that still run, SIGKILL to those that have not ended in time, and collects them.

    Signals are ignored from here on: the end is under way already. Where these children are not the `last`, one that
    arrives is raised as `Stopped` when all of them have ended.
    """
    if last:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _end(children)
    except Stopped:
        _end(children)
        raise


def _end(children: Sequence[Child]) -> None:
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    limits = [(TERMINATE_S if child.leave_s is None else child.leave_s, child) for child in running]
    for limit_s, child in sorted(limits, key=lambda each: each[0]):
        try:
            child.process.wait(max(0.0, asked + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
    for child in children:
        if child.family:
            child.kill()  # what its leader has left behind
