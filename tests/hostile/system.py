"""The system that the hostile run attacks: one learner, two engines behind proxies that bend their answers, an actor
that names them and one that plays on whatever the learner names; encrypted sockets and an API key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.engines.network import free_port
from shared.keys import make_api_key, make_keys
from tests.hostile import rows
from tests.hostile.answers import BendingProxy
from tests.support.engines import wait_healthy
from tests.support.machine import children_of

RECIPE = "launch/recipes/colour_tiny.toml"
MODEL = "launch/models/colour_tiny"
NUM_SOUND, NUM_HOSTILE, HELD_OUT = 300, 120, 64


class System:
    """Nothing that ends is started again here; the actors' own supervisor does so, and that counts as a death."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.run = folder, folder / "runs" / "hostile"
        self.keys = folder / "keys"
        make_keys(self.keys, ["actor", "hostile"])
        make_api_key(self.keys)
        self.num_rows = rows.write(folder / "train.jsonl", NUM_SOUND, NUM_HOSTILE, seed)
        rows.write(folder / "held_out.jsonl", HELD_OUT, 0, 10**6)
        self.log = (folder / "output.log").open("wb")
        self.learner_address = f"tcp://127.0.0.1:{free_port()}"
        first = free_port(in_a_row=4)
        self.engine_ports = (first, first + 1)
        self._own = {f"engine {n}": self._start_engine(port) for n, port in enumerate(self.engine_ports)}
        for port in self.engine_ports:
            wait_healthy(f"http://127.0.0.1:{port}", 300.0)
        engines = [f"http://127.0.0.1:{port}" for port in self.engine_ports]
        self.proxies = [BendingProxy(first + 2 + n, url, seed) for n, url in enumerate(engines)]
        urls = {"engine.urls": json.dumps([proxy.url for proxy in self.proxies])}
        self.supervisors = {
            name: self._start("launch/actors.py", *self._arguments(engines))
            for name, engines in (("", urls), (" alone", {"engine.count": 0}))
        }
        self._own["learner"] = self._start("launch/learner.py", *self._arguments(urls))

    def _arguments(self, engines: dict[str, Any]) -> list[str]:
        fields: dict[str, Any] = {
            "run.dir": self.folder / "runs", "run.name": "hostile", "env.module": "tests/hostile/env.py",
            "data.source": self.folder / "train.jsonl", "data.eval_source": self.folder / "held_out.jsonl",
            "transport.keys": self.keys, "transport.max_message_bytes": 2**24,
            "learner.bind": self.learner_address, "actor.learner": self.learner_address,
            "actor.groups": 8, "actor.connect_timeout_s": 300,
            "engine.api_key_file": self.keys / "engine.key", "engine.request_timeout_s": 20,
            "learner.total_steps": 1_000_000, "learner.publish.timeout_s": 8, "learner.lease_s": 60,
            "eval.samples": HELD_OUT, "eval.every_steps": 20, "eval.best": "",
        }  # fmt: skip
        return ["--config", RECIPE, *(part for k, v in (fields | engines).items() for part in (f"--{k}", str(v)))]

    def _start_engine(self, port: int) -> subprocess.Popen[bytes]:
        options = ["--model-path", MODEL, "--port", str(port), "--max-context", "128", "--min-pixels", "1024"]
        options += [
            "--max-pixels",
            "1048576",
            "--weight-version",
            "none",
            "--api-key-file",
            str(self.keys / "engine.key"),
        ]
        return self._start("-m", "actor.engine.server", *options)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.getcwd()}
        return subprocess.Popen([sys.executable, *command], stdout=self.log, stderr=self.log, env=env)

    # ------------------------------------------------------------------ what is watched

    def processes(self) -> dict[str, int]:
        """Name -> process id of what runs now."""
        found = {name: process.pid for name, process in self._own.items() if process.poll() is None}
        for name, supervisor in self.supervisors.items():
            if supervisor.poll() is None:
                found[f"supervisor{name}"] = supervisor.pid
            for pid in children_of(supervisor.pid):
                with suppress(OSError):  # it has ended
                    if b"actor.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                        found[f"actor{name}"] = pid
        return found

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
            if path.exists()
            else []
        )

    def said(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")

    def stop(self) -> list[str]:
        """Ends the learner, then the actors, then the engines; who did not end well."""
        ends = [("learner", self._own["learner"], 130, 180.0)]
        ends += [(f"supervisor{name}", process, 130, 60.0) for name, process in self.supervisors.items()]
        ends += [(name, process, 0, 60.0) for name, process in self._own.items() if name != "learner"]
        bad = []
        for name, process, code, limit_s in ends:
            if process.poll() is None:
                process.terminate()
            try:
                if process.wait(limit_s) != code:
                    bad.append(f"{name} ended with {process.returncode}, not {code}")
            except subprocess.TimeoutExpired:
                bad.append(f"{name} did not end within {limit_s:g} s")
                process.kill()
                process.wait()
        for proxy in self.proxies:
            proxy.close()
        self.log.close()
        return bad
