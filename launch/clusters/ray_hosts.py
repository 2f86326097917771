"""A run's hosts inside Ray: what they are to do, and the actor that does it on each. Nothing here needs Ray.

Ray's workers get these classes by value, so that their Python needs nothing of Pronk; the hosts' commands start the
run's own environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass

from actor.isolation.lifeline import tied_to_this_process

ENDED = "ray.ended"  # in the cluster folder: how the last run under this name has ended
ADDRESS_S = 30.0
LEAVE_S = 10.0  # between SIGTERM and SIGKILL, for all but a learner that is to write a checkpoint


@dataclass
class Part:
    """Hosts that come and go together: the learner's, or one with engines or actors. The command's shell knows
    PRONK_HEAD, the learner's address, PRONK_HOST, the host's own, and PRONK_NUMBER."""

    name: str  # its kind, and the number of the host where it is one
    command: str
    numbers: tuple[int, ...]  # of its hosts
    bundle: dict[str, float]  # what one host takes of its node
    leave_s: float  # between SIGTERM and SIGKILL when the run is stopped

    @property
    def kind(self) -> str:
        """learner, engines or actors"""
        return self.name.partition("-")[0]

    @property
    def is_learner(self) -> bool:
        return self.kind == "learner"

    def log(self, number: int) -> str:
        return f"learner-{number}" if self.is_learner else self.name


@dataclass
class Plan:
    """A run, as its supervisor is told of it."""

    job: str
    folder: str
    address: str  # shell command that prints a host's
    restarts: int
    parts: list[Part]


class Host:
    """One host of the run: a command in a process group of its own, which ends with this process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def address(self, command: str) -> tuple[str, str]:
        """What the command prints, and in words what is wrong with it; one of them is empty."""
        try:
            ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=ADDRESS_S)
        except subprocess.TimeoutExpired:
            return "", f"cluster.address = {command!r} has printed nothing in {ADDRESS_S:g} s"
        words = ended.stdout.split()
        if ended.returncode or len(words) != 1:
            said = " ".join((ended.stdout + ended.stderr).split())[-200:]
            return "", f"cluster.address = {command!r} shall print one address, and said {said!r}"
        return words[0], ""

    def start(self, command: str, env: dict[str, str], log: str) -> None:
        # Ray sets as many threads as the host has cores; how many a process takes is the recipe's matter.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "ab") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                env={**inherited, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tied_to_this_process(signal.SIGKILL),
            )

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def end(self, leave_s: float) -> None:
        """SIGTERM to the command, and SIGKILL to what is left of its process group then."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(leave_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
