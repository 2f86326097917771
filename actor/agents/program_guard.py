"""Runs an agent's program and everything that it starts, and ends all of it: when the program ends, when the actor
hangs up, or when the actor is gone.

    python -I -S program_guard.py DESCRIPTOR EPISODE WORD...

Each program has a guard of its own, a process of one thread. On Linux all that the program leaves behind becomes the
guard's child, whatever sessions and process groups it has made, and is killed. The last thing that the guard writes to
the socket DESCRIPTOR is a report, one JSON object; EPISODE is a file that it removes. Written to stay small: it imports
nothing of Pronk.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KEPT = 16 << 10  # bytes of the end of each output
MAX_OUTPUT = 64 << 20  # bytes of both: a program that prints more has lost its way
TERM_S = 2.0  # time from the request to end until the kill
KILL_S = 5.0  # time for the kernel to end what was killed
LOOK_S = 0.2  # between looks at the children, where no signal tells of their end
PART = 1 << 16


class Output:
    """The end of what a program writes to a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.size, self._end = descriptor, 0, bytearray()
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Read what is there, at most PART bytes of it; return False if there is nothing."""
        try:
            data = os.read(self.descriptor, PART)
        except BlockingIOError:
            return False
        self.size += len(data)
        self._end += data
        del self._end[:-KEPT]
        return bool(data)

    @property
    def text(self) -> str:
        return self._end.decode("utf-8", "replace")


class Guard:
    """One program: `code` is its exit code, or minus the number of the signal that has ended it; None while it runs."""

    def __init__(self, words: list[str]) -> None:
        """Start the program. Raise OSError if that is not possible."""
        self._wake, told = os.pipe()
        for descriptor in (self._wake, told):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        adopt_orphans()
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            words, stdin=null, stdout=-1, stderr=-1, start_new_session=True, preexec_fn=die_with_guard
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.out, self.err = (Output(pipe.fileno()) for pipe in (self._process.stdout, self._process.stderr))
        self.code: int | None = None

    def watch(self, link: socket.socket) -> str:
        """Read what the program writes until it ends. Return "" then, "flood" if it writes too much, "asked" if the
        actor hangs up before."""
        with selectors.DefaultSelector() as selector:
            for file in (link.fileno(), self._wake, self.out.descriptor, self.err.descriptor):
                selector.register(file, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(LOOK_S)}
                if self._wake in ready:
                    os.read(self._wake, PART)
                self.reap()
                if self.code is not None:
                    return ""
                if link.fileno() in ready:
                    return "asked"
                for output in (self.out, self.err):
                    if output.descriptor in ready and not output.read():
                        selector.unregister(output.descriptor)
                if self.out.size + self.err.size > MAX_OUTPUT:
                    return "flood"

    def reap(self) -> bool:
        """Take note of the children that have ended; return False if there are none left, of whatever generation."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._process.pid:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)

    def ask_to_end(self) -> None:
        """Send the program and its group SIGTERM, and give it time to end."""
        self._kill_group(signal.SIGTERM)
        deadline = time.monotonic() + TERM_S
        while self.reap() and self.code is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def end_all(self) -> int:
        """Kill the program and all that it has started; return how many groups of processes the kernel has not
        ended."""
        for output in (self.out, self.err):  # what was written at the end, not what others go on writing
            while output.size <= MAX_OUTPUT and output.read():
                pass
        if self.code is None:
            self._kill_group(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        while self.reap():
            groups = groups_of_descendants()
            for group in groups:  # at once, so that none of it can start another process meanwhile
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            if time.monotonic() > deadline:
                return len(groups)
            time.sleep(0.002)
        return 0

    def _kill_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def adopt_orphans() -> None:
    """Become the parent of whatever this process's descendants leave behind. Only Linux supports this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_guard() -> None:
    """Let the kernel kill this process, the program, when its guard is gone. Only Linux supports this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def groups_of_descendants() -> set[int]:
    """Return the process groups of this process's descendants that run; none where the system has no /proc."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            state, parent, group = file.read().rpartition(b")")[2].split()[:3]  # a name may have any characters
            if state != b"Z":
                children.setdefault(int(parent), []).append((int(name), int(group)))
    found = [*children.get(os.getpid(), ())]
    for pid, _ in found:
        found += children.get(pid, ())
    return {group for _, group in found} - {os.getpgrp()}


def run(link: socket.socket, words: list[str]) -> dict[str, object]:
    """Run the program to its end, or the actor's; return the report."""
    try:
        guard = Guard(words)
    except OSError as error:
        return {"failed": f"{error.strerror or error}: {error.filename or words[0]}"}
    ended = guard.watch(link)
    if ended == "asked":
        guard.ask_to_end()
    left = guard.end_all()
    return {"ended": ended, "code": guard.code, "out": guard.out.text, "err": guard.err.text, "left": left}


def main() -> None:
    link, episode, words = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:]
    link.set_inheritable(False)
    try:
        report = run(link, words)
    finally:
        with suppress(OSError):
            os.unlink(episode)
    link.setblocking(True)
    with suppress(OSError):  # the actor is gone
        link.sendall(json.dumps(report).encode())


if __name__ == "__main__":
    main()
