"""A run on a cluster's scheduler, as a user has it: a recipe, folders, and the four actions of launch/cluster.py."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.engines.network import free_port

ROOT = Path(__file__).resolve().parents[2]
COLOUR = "launch/recipes/colour_tiny.toml"
LONGEST_S = 240.0
ENDLESS = 10_000  # steps of a run that a test stops: no machine is so fast that it ends before


class Submitted:
    """One run's recipe and folders, and the command line's four actions on it."""

    def __init__(self, on: str, folder: Path, name: str, **fields: object) -> None:
        self.on = on
        self.run, self.cluster = folder / name, folder / f"{name}.cluster"
        fields = {"run.dir": folder, "run.name": name, "learner.resume": "auto", "cluster.cpus_per_node": 1} | fields
        fields |= {"cluster.environment": Path(sys.prefix), "cluster.learner_nodes": 2}
        fields |= {"learner.bind": f"tcp://127.0.0.1:{free_port()}", "cluster.rendezvous_port": free_port()}
        fields |= {"engine.port": free_port()}
        self.words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]

    def call(self, action: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(action, *words), cwd=ROOT, capture_output=True, text=True, timeout=240)

    def command(self, action: str, *words: str) -> list[str]:
        program = [sys.executable, "launch/cluster.py", action, "--on", self.on, "--config", COLOUR]
        return [*program, *self.words, *words]

    def secrets(self) -> list[str]:
        """What must be nowhere but in the key files."""
        lines = [line for path in (self.cluster / "keys").glob("*.key") for line in path.read_text().splitlines()]
        return [line.split('"')[-2] if '"' in line else line for line in lines]

    def steps(self) -> int:
        """How many steps the run has in its metrics."""
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return sum('"optim/' in line for line in lines)

    def until(self, what: str, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not reached():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{path.name}: {path.read_text()[-2500:]}" for path in self.cluster.glob("logs/*.log"))
                raise TimeoutError(f"not in {LONGEST_S:g} s: {what}; {self.call('status').stdout}\n{logs}")
            time.sleep(0.5)
