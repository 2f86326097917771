"""Takes torch's profile of the next step of a run that trains on this host, and on a GPU a snapshot of its memory:

    python launch/profile_step.py runs/sokoban_tiny

It sends SIGUSR1 to the learner's rank 0, waits for the step, and prints the file's path. The run goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import fcntl
import os
import re
import signal
import socket
import time

from learner.profile_request import FOLDER
from learner.run_folder_watch import LOCK
from shared.config.recipe import ConfigError, fail

WAIT_S = 600.0
LOOK_S = 0.2


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        process = learner_of(options.run)
        before = profiles(options.run)
        os.kill(process, signal.SIGUSR1)
        print(f"the learner, process {process}, profiles its next step", file=sys.stderr)
        print(new_profile(options.run, before, process, options.wait))
    except (ValueError, OSError) as error:
        return fail(error)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    made.add_argument("--wait", type=float, default=WAIT_S, metavar="S", help="limit for the step in seconds")
    return made


def learner_of(run: Path) -> int:
    """Return the process of the learner that trains in a folder. Raise ConfigError if there is none on this host that
    heeds the signal: any other process would end by it."""
    try:
        with (run / LOCK).open("r+") as file:
            said = re.fullmatch(r"process (\d+) on (\S+)\n", file.read())
            is_held = _is_held(file.fileno())
    except FileNotFoundError:
        raise ConfigError(f"{run} has no {LOCK}: name the folder of a run that trains now") from None
    if said is None or not is_held:
        raise ConfigError(f"no learner trains in {run} now; start it, then ask for a profile")
    process, host = int(said[1]), said[2]
    if host != socket.gethostname():
        raise ConfigError(f"the learner of {run} is on {host}: run this command there")
    if not heeds_signal(process):
        raise ConfigError(
            f"process {process}, the learner of {run}, does not heed SIGUSR1 yet; ask again when it has begun"
        )
    return process


def _is_held(descriptor: int) -> bool:
    """Tell whether another process holds the file's lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def heeds_signal(process: int) -> bool:
    """Tell whether a process has a handler for SIGUSR1; True where /proc does not tell."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return not Path("/proc/self/status").exists()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, flags=re.M)
    return caught is None or bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def profiles(run: Path) -> set[Path]:
    return set((run / FOLDER).glob("step_*_rank_0.json.gz"))


def new_profile(run: Path, before: set[Path], process: int, wait_s: float) -> Path:
    """Return the profile that was not there before. Raise ConfigError if none comes in time, or the learner ends."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        alive = heeds_signal(process)
        if new := profiles(run) - before:
            return max(new)
        if not alive:
            raise ConfigError(f"the learner of {run}, process {process}, has ended before its next step was complete")
        time.sleep(LOOK_S)
    raise ConfigError(
        f"the learner of {run}, process {process}, has completed no step within {wait_s:g} s; the profile of its next "
        f"one comes into {run / FOLDER}"
    )


if __name__ == "__main__":
    sys.exit(main())
