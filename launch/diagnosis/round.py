"""Starts the round in processes of its own, follows its stages, and tells how each ended, whatever ended them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.diagnosis.miniature import Miniature
from launch.diagnosis.report import Finding, State, failed, not_checked, ok
from launch.engines.commands import last_lines
from launch.processes.children import ROOT, Child, cpu_env, module_path, start_family
from launch.processes.restarts import how_it_ended

STAGES = {  # and what may help where one fails
    "learner": "see learner.plan for what fits; a damaged model: download it again",
    "engine": "see the log below; for SGLang's own: make sglang-env builds its environment anew",
    "weights": "see docs/how-to/doctor.md, weights",
    "episode": "python -m envs.check MODULE plays the environment alone",
    "step": "set learner.parallel.attention = 'sdpa', or model.dtype = 'float32', to find the kernel",
    "weights again": "see docs/how-to/doctor.md, weights",
    "checkpoint": "see the run folder's disk and quota, or set --run.dir elsewhere",
}
STAGE_S = 300.0  # longest time of one, start of torch included; the engine has the recipe's besides
LEAVE_S = 10.0


@dataclass(slots=True)
class Followed:
    """What the events say so far."""

    path: Path
    stage: str = ""
    since: float = field(default_factory=time.monotonic)
    findings: dict[str, Finding] = field(default_factory=dict)
    failed: bool = False
    _read: int = 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._read += len(line.encode())
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        stage, state = event["stage"], event["state"]
        if state == "begun":
            self.stage, self.since = stage, time.monotonic()
            return
        if not self.failed:  # what comes after the first failure, of another rank, follows from it
            found: State = state
            cure = STAGES[stage] if state == "failed" else ""
            self.findings[stage] = Finding(f"round: {stage}", found, event["found"], cure, event.get("seconds"))
            self.failed = state == "failed"
        if state == "ok":
            self.stage = ""


def run_round(small: Miniature, tell: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """All stages, in their order; those behind a failure are not checked. `tell` is called with each as it begins."""
    words = "; ".join(small.changes) or "the recipe's own model and task, shortened"
    found = [ok("round", words)]
    folder = Path(tempfile.mkdtemp(prefix="pronk-doctor-"))
    follow, log = Followed(folder / "events.jsonl"), folder / "round.log"
    order = {"recipe": small.recipe.model_dump(mode="json"), "folder": os.getcwd(), "events": str(follow.path)}
    (folder / "order.json").write_text(json.dumps(order))
    command = [sys.executable, str(ROOT / "launch/processes/torchrun.py"), "--standalone"]
    command += [f"--nproc-per-node={small.ranks}", str(ROOT / "launch/diagnosis/stages.py"), str(folder / "order.json")]
    env = cpu_env(small.recipe.learner.threads) | {"PYTHONPATH": module_path(), "TOKENIZERS_PARALLELISM": "false"}
    child = start_family("round", command, log, env=env)
    try:
        how = watch(child, follow, STAGE_S, small.recipe.engine.start_timeout_s, tell)
    except BaseException:  # the doctor was asked to stop
        end(child)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    end(child)
    follow.read()
    if how and not follow.failed:
        stage = follow.stage or next((name for name in STAGES if name not in follow.findings), "checkpoint")
        follow.findings[stage] = failed(f"round: {stage}", f"{how}; {last_lines(log, 3)}", STAGES[stage])
    for stage in STAGES:
        missing = not_checked(f"round: {stage}", "an earlier stage failed")
        found.append(follow.findings.get(stage, missing))
    if how:
        found.append(ok("round: log", str(log)))
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def watch(child: Child, follow: Followed, stage_s: float, start_s: float, tell: Callable[[str], None]) -> str:
    """Until the process has ended, or a stage takes too long. In words what went wrong; empty if nothing did."""
    told = ""
    while True:
        how = how_it_ended(child)
        follow.read()
        if follow.stage and follow.stage != told:
            tell(told := follow.stage)
        if how:
            return "" if child.process.returncode == 0 else f"its process {how}"
        limit_s = stage_s + (start_s if follow.stage == "engine" else 0.0)
        if time.monotonic() - follow.since > limit_s:
            return f"no end within {limit_s:g} s"
        time.sleep(0.05)


def end(child: Child) -> None:
    """Asks it to stop, which ends the engine too; then ends it."""
    if child.process.poll() is None:
        child.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(LEAVE_S)
    child.kill()
