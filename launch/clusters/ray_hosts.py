"""A run's hosts inside Ray: what each has to do, and the Ray actor that does it. Nothing here imports Ray.

Ray's workers get these classes pickled by value, so that their Python environment need not have Pronk; the hosts'
commands activate the run's own environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass

from actor.isolation.lifeline import tied_to_this_process

ENDED = "ray.ended"  # file in the cluster folder: how the last run of this name ended
ADDRESS_S = 30.0
LEAVE_S = 10.0  # between SIGTERM and SIGKILL, except for a learner that writes a checkpoint


@dataclass
class HostRole:
    """Hosts that start and end together: all learner hosts, or a single host with engines or actors. The command runs
    in a shell with the variables PRONK_HEAD (the learner's address), PRONK_HOST (the host's own address) and
    PRONK_NUMBER."""

    name: str  # its kind, and for a single host its number
    command: str
    numbers: tuple[int, ...]  # numbers of its hosts
    bundle: dict[str, float]  # resources that one host takes from its node
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
class RayPlan:
    """The description of a run for its supervisor."""

    job: str
    folder: str
    address: str  # shell command that prints a host's address
    restarts: int
    parts: list[HostRole]


class Host:
    """One host of the run: runs a command in its own process group, which ends with this process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def address(self, command: str) -> tuple[str, str]:
        """Run the command that prints the host's address; return (address, error), one of which is empty."""
        try:
            ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=ADDRESS_S)
        except subprocess.TimeoutExpired:
            return "", f"cluster.address = {command!r} has printed nothing in {ADDRESS_S:g} s"
        words = ended.stdout.split()
        if ended.returncode or len(words) != 1:
            output = " ".join((ended.stdout + ended.stderr).split())[-200:]
            return "", f"cluster.address = {command!r} shall print one address, and said {output!r}"
        return words[0], ""

    def start(self, command: str, env: dict[str, str], log: str) -> None:
        # Ray sets OMP_NUM_THREADS to the host's cores; here the recipe decides the number of threads.
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
        """Return the exit code; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def end(self, leave_s: float) -> None:
        """Send SIGTERM to the command, and after `leave_s` SIGKILL to what is left of its process group."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(leave_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
