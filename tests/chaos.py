"""The real system on this machine under random faults: two learner ranks, two engines, two actors, a bad line.

    python -m tests.chaos --minutes 5 --seed 0

Ends with a table of the faults, the time to recover from each kind, and what the ledger says: no ticket trained twice,
none lost, and a policy that has learned. The last line is one JSON object; exit code 1 if anything of that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos_proxy import FAULTS, Proxy
from tests.test_end_to_end import children_of, free_port

RECIPE = "launch/recipes/colour_tiny.toml"
STEP_WITHIN_S = 150.0
PAUSES = {"actor": 4.0, "engine": 3.5, "learner": 2.0}


class Chaos:
    """Starts the system, breaks it, and keeps the books of what was broken and how long it took to recover."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.run = folder, folder / "chaos"
        self.injected: Counter[str] = Counter()
        self.recovered: defaultdict[str, list[float]] = defaultdict(list)
        self.learner_starts = 0
        port = free_port()
        self.proxy = Proxy(f"tcp://127.0.0.1:{port}", seed)
        env = {"raises": 0.005, "hangs": 0.002, "hang_s": 3.0}
        fields: dict[str, Any] = {
            "run.dir": folder, "run.name": "chaos", "env.module": "tests/chaos_env.py", "env.args": json.dumps(env),
            "env.timeout_s": 2, "learner.bind": f"tcp://127.0.0.1:{port}", "actor.learner": self.proxy.address,
            "actor.processes": 2, "actor.max_restarts": 10000, "actor.heartbeat_s": 1, "actor.connect_timeout_s": 300,
            "engine.count": 2, "engine.port": free_port(), "engine.max_restarts": 10000, "engine.request_timeout_s": 10,
            "learner.total_steps": 1000000, "learner.resume": "auto", "learner.checkpoint_every": 5,
            "learner.lease_s": 20, "learner.actor_timeout_s": 6, "learner.publish_timeout_s": 8, "eval.samples": 0,
        }  # fmt: skip
        self.arguments = ["--config", RECIPE, *(part for k, v in fields.items() for part in (f"--{k}", str(v)))]
        self.log = (folder / "output.log").open("wb")
        self.actors = self.start([sys.executable, "launch/actors.py", *self.arguments])
        self.learner = self.start_learner()

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def start_learner(self) -> subprocess.Popen[bytes]:
        self.learner_starts += 1
        torchrun = ["launch/ranks.py", "--standalone", "--nproc-per-node", "2", "--max-restarts", "10000"]
        return self.start([sys.executable, *torchrun, "launch/learner.py", *self.arguments])

    # ------------------------------------------------------------------ what runs

    def pids(self, kind: str) -> list[int]:
        """Processes of one kind: actor, engine or learner (its ranks)."""
        parent = self.learner if kind == "learner" else self.actors
        part = {"actor": "actor.worker", "engine": "actor.engine.server", "learner": "launch/learner.py"}[kind]
        found = []
        for pid in children_of(parent.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if part in command and "launch/ranks.py" not in command:
                found.append(pid)
        return found

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(as_json, lines) if "rollout/reward" in row]

    def tend(self) -> None:
        """The learner's torchrun is started again when it has ended; the actors' supervisor must never end."""
        if self.learner.poll() is not None:
            self.learner = self.start_learner()
        if self.actors.poll() is not None:
            raise SystemExit(f"the actors' supervisor ended with {self.actors.returncode}; see {self.log.name}")

    def wait_for_step(self, kind: str, since: int, at: float) -> None:
        """Until the learner has made a step after the fault; it must not take too long."""
        while len(self.rows()) <= since:
            self.tend()
            if time.monotonic() - at > STEP_WITHIN_S:
                raise SystemExit(f"no step within {STEP_WITHIN_S:g} s of {kind!r}; see {self.log.name}")
            time.sleep(0.25)
        self.recovered[kind].append(time.monotonic() - at)

    # ------------------------------------------------------------------ faults

    def kill(self, kind: str) -> None:
        if pids := self.pids(kind):
            os.kill(self.random.choice(pids), signal.SIGKILL)

    def pause(self, kind: str) -> None:
        for pid in self.pids(kind)[:1]:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSES[kind])
            os.kill(pid, signal.SIGCONT)

    def preempt(self) -> None:
        self.learner.terminate()

    def disk(self) -> None:
        """For a while no file of the learner's ranks may grow beyond a few bytes."""
        pids = self.pids("learner")
        for size in (64, resource.RLIM_INFINITY):
            for pid in pids:
                if Path(f"/proc/{pid}").exists():
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            time.sleep(4.0 if size == 64 else 0.0)

    def menu(self, disk: bool) -> dict[str, tuple[int, Callable[[], None]]]:
        """Weight and action of each fault."""
        faults: dict[str, tuple[int, Callable[[], None]]] = {
            "kill actor": (6, lambda: self.kill("actor")),
            "stop actor": (6, lambda: self.pause("actor")),
            "kill engine": (4, lambda: self.kill("engine")),
            "stop engine": (4, lambda: self.pause("engine")),
            "kill learner rank": (3, lambda: self.kill("learner")),
            "stop learner rank": (4, lambda: self.pause("learner")),
            "preempt learner": (2, self.preempt),
        }
        for fault in FAULTS:
            faults[f"messages {fault}"] = (6, lambda fault=fault: self.proxy.disturb(fault, 3.0))  # type: ignore[misc]
        if disk:
            faults["full disk"] = (3, self.disk)
        return faults

    def break_things(self, seconds: float, every_s: float, disk: bool) -> None:
        menu, end = self.menu(disk), time.monotonic() + seconds
        while time.monotonic() < end:
            name = self.random.choices(list(menu), [weight for weight, _ in menu.values()])[0]
            since, at = len(self.rows()), time.monotonic()
            menu[name][1]()
            self.injected[name] += 1
            self.wait_for_step(name, since, at)
            time.sleep(max(0.0, every_s - (time.monotonic() - at)))

    def stop(self) -> None:
        """Lets the learner write its last checkpoint."""
        self.learner.terminate()
        self.learner.wait(60)
        self.actors.terminate()
        self.actors.wait(30)
        self.proxy.close()


def as_json(line: str) -> dict[str, Any]:
    """A line that a kill cut off is nothing."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}


def audit(run: Path) -> dict[str, Any]:
    """What the ledger and the last checkpoint say: each issued ticket is trained once, dropped, or open."""
    steps: dict[int, list[int]] = {}
    for entry in map(as_json, (run / "ledger.jsonl").read_text().splitlines()):
        if entry:
            steps = {step: tickets for step, tickets in steps.items() if step < entry["step"]}
            steps[entry["step"]] = entry["tickets"]
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    step = int(last.name.removeprefix("step_"))
    state = json.loads((last / "meta.json").read_text())["intake"]["tickets"]
    trained = [ticket for number, tickets in steps.items() if number <= step for ticket in tickets]
    missing = [number for number in range(1, step + 1) if number not in steps]
    still_open = {number for number, _ in state["open"]}
    dropped = sum(state["dropped"].values())
    return {
        "issued": state["issued"], "trained": len(trained), "dropped": state["dropped"], "open": len(still_open),
        "reissued": state["reissued"], "steps": step, "steps_missing_in_ledger": len(missing),
        "duplicates": len(trained) - len(set(trained)) + len(still_open & set(trained)),
        "lost": state["issued"] - len(set(trained)) - dropped - len(still_open),
    }  # fmt: skip


def table(chaos: Chaos, found: dict[str, Any]) -> str:
    lines = ["| fault | injected | survived | median to the next step, s | longest, s |", "|---|---|---|---|---|"]
    for name, count in sorted(chaos.injected.items()):
        times = chaos.recovered[name]
        lines.append(f"| {name} | {count} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |")
    lines += ["", "| ledger | |", "|---|---|", *(f"| {name} | {value} |" for name, value in found.items())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=4.0, metavar="SECONDS", help="between faults, at least")
    parser.add_argument("--no-disk", action="store_true", help="leave out the full disk")
    parser.add_argument("--folder", type=Path, help="of the run; a temporary one by default, kept after a failure")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(folder, options.seed)
    try:
        chaos.wait_for_step("start", 0, time.monotonic())
        chaos.break_things(60 * options.minutes, options.every, disk=not options.no_disk)
        chaos.wait_for_step("end", len(chaos.rows()) + 2, time.monotonic())
    finally:
        chaos.stop()
    found = audit(chaos.run)
    rewards = [row["rollout/reward"] for row in chaos.rows()]
    found["reward_first"] = round(statistics.mean(rewards[:3]), 3)
    found["reward_last"] = round(statistics.mean(rewards[-5:]), 3)
    print(table(chaos, found))
    good = not found["duplicates"] and not found["lost"] and found["reward_last"] > found["reward_first"] + 0.2
    result = {"seed": options.seed, "minutes": options.minutes, "faults": sum(chaos.injected.values()), "ok": good}
    times = {name: [round(statistics.median(t), 1), round(max(t), 1)] for name, t in chaos.recovered.items()}
    print(json.dumps({**result, **found, "recover_s": times, "messages": dict(chaos.proxy.counts)}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
