"""A Slurm cluster of several nodes on this machine: munge, a controller and one daemon a node, in a folder of its own.

It needs root, and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.engines.network import free_port
from tests.support.machine import children_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
START_S = 30.0


class LocalSlurm:
    """Its nodes are n1, n2, ... of one CPU each; commands find it by the environment variable SLURM_CONF."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = folder / "slurm.conf"

    def start(self) -> None:
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir(parents=True)
        self.conf.write_text(self._configuration())
        os.environ["SLURM_CONF"] = str(self.conf)
        self._start_munge()
        self._start("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        deadline = time.monotonic() + START_S
        while (idle := self.states()) != dict.fromkeys(self.nodes, "idle"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Slurm's nodes are not idle after {START_S:g} s but {idle}: see {self.folder}/log")
            time.sleep(0.3)

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def lose_node(self, node: str) -> None:
        """As if the host's power failed: its daemon, and all that runs for its jobs, are killed at once."""
        daemon = self.processes.pop(node)
        daemon.kill()
        daemon.wait()
        found = subprocess.run(["pgrep", "slurmstepd"], capture_output=True, text=True, timeout=20).stdout.split()
        families = [[int(step), *children_of(int(step))] for step in found]
        for pid in [pid for family in families if any(_is_on(node, pid) for pid in family) for pid in family]:
            _kill(pid)

    def states(self) -> dict[str, str]:
        said = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %t"], capture_output=True, text=True, timeout=20).stdout
        return dict(line.split() for line in said.splitlines())

    def stop(self) -> None:
        subprocess.run(["scancel", "--me"], capture_output=True, timeout=20)
        for name in reversed(list(self.processes)):
            process = self.processes.pop(name)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.environ.pop("SLURM_CONF", None)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _start_munge(self) -> None:
        """The system's munged if one answers; else one of our own."""
        if subprocess.run("munge -n | unmunge", shell=True, capture_output=True).returncode == 0:
            return
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        os.makedirs("/run/munge", exist_ok=True)
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}")
        deadline = time.monotonic() + START_S
        while subprocess.run("munge -n | unmunge", shell=True, capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"munged does not answer after {START_S:g} s: see {self.folder}/log")
            time.sleep(0.2)

    def _configuration(self) -> str:
        host, first = socket.gethostname().partition(".")[0], free_port(len(self.nodes) + 1)
        settings = {
            "ClusterName": "here",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": first,
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": "cred_expire=5",  # a job waits for so long before it is started again
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "ReturnToService": 2,
            "SlurmdTimeout": 15,
            "SchedulerParameters": "bf_interval=2,sched_interval=2",
            "KillWait": 20,
            "SlurmdParameters": "config_overrides",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool/%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "%n.pid",
            "SlurmctldLogFile": self.folder / "log/slurmctld.log",
            "SlurmdLogFile": self.folder / "log/%n.log",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=4000"
            for port, node in enumerate(self.nodes, first + 1)
        ]
        lines.append(f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"


@contextmanager
def local_slurm(folder: Path, nodes: int) -> Iterator[LocalSlurm]:
    slurm = LocalSlurm(folder, nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def missing() -> str:
    """What keeps it from running here; empty if nothing does."""
    if os.geteuid():
        return "a Slurm cluster on this machine needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"apt-get install slurm-wlm munge: {', '.join(lacking)} not found" if lacking else ""


def _is_on(node: str, pid: int) -> bool:
    """Whether the process belongs to a job on this node, whose name Slurm gives to all that it starts."""
    try:
        return f"SLURMD_NODENAME={node}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, 9)
