"""The real system that the chaos run breaks: two learner ranks, two engines, three actors that reach the learner
through a proxy, one of them with agents in processes of their own, and one disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.engines.network import free_port
from tests.chaos.deaths import Deaths
from tests.chaos.disk import Disk
from tests.chaos.links import Link
from tests.chaos.proxy import Peer, Proxy
from tests.chaos.sockets import trouble
from tests.support.machine import children_of, is_copy

RECIPE, MODEL = "launch/recipes/colour_tiny.toml", "launch/models/colour_tiny"
PARTS = {"actor": "actor.worker", "engine": "actor.engine.server", "learner": "tests.chaos.learner"}
ASK_S = 0.5
NUM_AGENTS = 2
AGENTS_ACTOR = 2  # the number of the actor whose episodes they play
STEP_S = 0.7  # of an environment, as real ones take time: with it the machine is not busy throughout


class System:
    """Starts everything, and the learner again when it has ended; reports what runs and how far training is."""

    def __init__(self, folder: Path, seed: int, disk: bool) -> None:
        self.folder = folder
        self.flags = folder / "flags"  # what the environment looks at
        self.flags.mkdir()
        self.disk, self.no_disk = None, "" if disk else "not wanted"
        try:
            self.disk = Disk(folder / "disk") if disk else None
        except OSError as error:
            self.no_disk = str(error)
            print(f"no faults of the disk, as none can be mounted: {error}", file=sys.stderr)
        self.run = folder / "disk" / "chaos"
        port, self.engine_port = free_port(), free_port(in_a_row=4)
        self.links = [Link(self.engine_port + 2 + slot, self.engine_port + slot) for slot in range(2)]
        self.proxy = Proxy(f"tcp://127.0.0.1:{port}", seed)
        self.learner_address = f"tcp://127.0.0.1:{port}"
        fields: dict[str, Any] = {
            "run.dir": folder / "disk", "run.name": "chaos", "env.module": "tests/chaos/env.py",
            "env.args": json.dumps({"folder": str(self.flags), "hang_s": 3.0, "step_s": STEP_S}),
            "env.timeout_s": 2, "env.threads": 32,
            "learner.bind": f"tcp://127.0.0.1:{port}", "actor.learner": self.proxy.address,
            "actor.processes": 2, "actor.groups": 8, "actor.max_restarts": 10000,
            "actor.connect_timeout_s": 300,
            "engine.count": 2, "engine.port": self.engine_port, "engine.max_restarts": 10000,
            "engine.request_timeout_s": 10, "learner.total_steps": 1000000, "learner.resume": "auto",
            "learner.checkpoint.every": 5, "learner.lease_s": 20,
            "learner.publish.timeout_s": 8, "eval.samples": 0,
        }  # fmt: skip
        self.arguments = ["--config", RECIPE, *(part for k, v in fields.items() for part in (f"--{k}", str(v)))]
        self.log = (folder / "output.log").open("wb")
        self._size, self._rows = 0, list[dict[str, Any]]()
        self.engines = self._start([sys.executable, "-m", "tests.chaos.engines", *self.arguments])
        self.arguments += ["--engine.urls", json.dumps([link.url for link in self.links])]
        self.actors = self._start([sys.executable, "launch/actors.py", *self.arguments])
        agents_port = free_port()
        self.agents_url = f"http://127.0.0.1:{agents_port + AGENTS_ACTOR}"
        host = [sys.executable, "-m", "tests.chaos.host", str(AGENTS_ACTOR), *self.arguments]
        self.agents_host = self._start([*host, "--rollout.listen", f"127.0.0.1:{agents_port}"])
        self.agents = [self._start_agent() for _ in range(NUM_AGENTS)]
        self.learner = self._start_learner()
        self.deaths = Deaths(self.members)
        self.no_sockets = trouble(self.actors.pid)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CHAOS_FLAGS": str(self.flags)}
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, env=env)

    def _start_learner(self) -> subprocess.Popen[bytes]:
        torchrun = ["launch/processes/torchrun.py", "--standalone", "--nproc-per-node", "2", "--max-restarts", "10000"]
        return self._start([sys.executable, *torchrun, "-m", "tests.chaos.learner", *self.arguments])

    def _start_agent(self) -> subprocess.Popen[bytes]:
        return self._start([sys.executable, "-m", "tests.chaos.agent", self.agents_url])

    def supervise(self) -> None:
        """Starts the learner and agents again when they have ended; SystemExit if a supervisor or a proxy has."""
        self.deaths.look()
        for number, agent in enumerate(self.agents):
            if agent.poll() is not None:
                self.agents[number] = self._start_agent()
        if self.learner.poll() is not None:
            self.learner = self._start_learner()
        for name, supervisor in (("actors", self.actors), ("agents", self.agents_host), ("engines", self.engines)):
            if supervisor.poll() is not None:
                raise SystemExit(f"the {name}' supervisor ended with {supervisor.returncode}; see {self.log.name}")
        if not (self.proxy.alive and all(link.alive for link in self.links)):
            raise SystemExit("the proxy's thread ended; this is a fault of the test")

    def members(self, kind: str) -> dict[int, int]:
        """Slot -> process id of the running actors, engines or learner ranks."""
        parent = {"learner": self.learner, "actor": self.actors, "engine": self.engines}[kind]
        found = {}
        for pid in children_of(parent.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if PARTS[kind] in command and "launch/processes/torchrun.py" not in command and not is_copy(pid):
                    found[self._slot(kind, pid, command)] = pid
            except (OSError, KeyError):  # it has ended, or is just being started
                continue
        return found

    def _slot(self, kind: str, pid: int, command: list[str]) -> int:
        if kind == "engine":
            return int(command[command.index("--port") + 1]) - self.engine_port
        pairs = (pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"))
        environ = {name: value for name, _, value in pairs}
        return int(environ["RANK"]) if kind == "learner" else int(json.loads(environ["PRONK_ACTOR"])["index"])

    def ranks(self) -> list[int]:
        return list(self.members("learner").values())

    # ------------------------------------------------------------------ how far training is

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each trained step, in order; a restart repeats some steps."""
        path = self.run / "metrics.jsonl"
        if path.exists() and (size := path.stat().st_size) != self._size:
            self._size, lines = size, path.read_text(errors="replace").splitlines()
            self._rows = [row for row in map(as_json, lines) if "rollout/reward" in row]
        return self._rows

    def checkpoint_at(self) -> float:
        """When the last whole checkpoint was written, in seconds since the epoch."""
        found = (self.run / "checkpoints").glob("step_*/meta.json")
        return max((path.stat().st_mtime for path in found), default=0.0)

    def published(self) -> str:
        """The full name of the weights that the learner has published last, as far as the ledger says."""
        path = self.run / "ledger.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return next((name for line in reversed(lines) if (name := as_json(line).get("weights"))), "")

    def first_process(self) -> str:
        """What tells the weights of the learner's first process from those of others; empty before its first step."""
        path = self.run / "ledger.jsonl"
        with suppress(OSError), path.open() as ledger:
            return str(as_json(ledger.readline()).get("weights", "")).partition("-")[2]
        return ""

    def weights_of(self, slot: int) -> str | None:
        """The full name of the weights that an engine serves; None = it does not answer."""
        try:
            url = f"http://127.0.0.1:{self.engine_port + slot}/model_info"
            with urllib.request.urlopen(url, timeout=ASK_S) as answer:
                return str(json.load(answer)["weight_version"])
        except (OSError, ValueError, KeyError, urllib.error.URLError):
            return None

    def peers_of(self, slot: int) -> list[Peer]:
        return [peer for peer in list(self.proxy.peers.values()) if peer.name.endswith(f"-actor{slot}")]

    def stop(self) -> None:
        """Ends all processes; the learner writes its last checkpoint first."""
        if self.disk:
            self.disk.thaw()
            self.disk.free()
        try:
            others = [(each, 60) for each in (self.actors, self.agents_host, self.engines)]
            for process, limit_s in ((self.learner, 120), *others):
                process.terminate()
                process.wait(limit_s)
        finally:
            for agent in self.agents:
                agent.kill()
                agent.wait()
            self.proxy.close()
            for link in self.links:
                link.close()
            self.log.close()
            if self.disk:
                self.disk.close(self.folder / "kept")
                self.run = self.folder / "kept" / "chaos"


def as_json(line: str) -> dict[str, Any]:
    """Reads one line; {} for a line that a kill or a full disk has cut off."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {}
