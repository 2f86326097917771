"""Starts the trial in separate processes, follows its stages, and reports how each ended, even if a process crashes."""

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

from launch.doctor_checks.trial_recipe import TrialRecipe
from launch.engines.engine_supervisor import last_lines
from launch.findings import Finding, State, failed, not_checked, ok
from launch.processes.children import ROOT, Child, cpu_env, module_path, start_family
from launch.processes.restarts import how_it_ended
from shared.config.recipe import WITH_SECRETS

STAGES = {  # the stages, and what may help if one fails
    "learner": "see learner.plan for what fits; a damaged model: download it again",
    "engine": "see the log below; for SGLang's own: make sglang-env builds its environment anew",
    "weights": "see docs/how-to/doctor.md, weights",
    "episode": "python -m envs.check MODULE plays the environment alone",
    "step": "set learner.parallel.attention = 'sdpa', or model.dtype = 'float32', to find the kernel",
    "weights again": "see docs/how-to/doctor.md, weights",
    "checkpoint": "see the run folder's disk and quota, or set --run.dir elsewhere",
}
STAGE_S = 300.0  # limit of one stage, torch's import included; the engine's has its start_timeout_s more
LEAVE_S = 10.0


@dataclass(slots=True)
class TrialProgress:
    """The state of the trial, from the events read so far."""

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
        if not self.failed:  # later failures, of other ranks, follow from the first
            found: State = state
            cure = STAGES[stage] if state == "failed" else ""
            self.findings[stage] = Finding(f"trial: {stage}", found, event["found"], cure, event.get("seconds"))
            self.failed = state == "failed"
        if state == "ok":
            self.stage = ""


def run_trial(trial: TrialRecipe, tell: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Run all stages in order; those after a failure are not checked. `tell` is called with the name of each stage when
    it begins."""
    words = "; ".join(trial.changes) or "the recipe's own model and task, shortened"
    findings = [ok("trial", words)]
    folder = Path(tempfile.mkdtemp(prefix="pronk-doctor-"))
    follow, log = TrialProgress(folder / "events.jsonl"), folder / "trial.log"
    order = {
        "recipe": trial.recipe.model_dump(mode="json", context=WITH_SECRETS),
        "folder": os.getcwd(),
        "events": str(follow.path),
    }
    (folder / "order.json").write_text(json.dumps(order))
    command = [sys.executable, str(ROOT / "launch/processes/torchrun.py"), "--standalone"]
    command += [
        f"--nproc-per-node={trial.ranks}",
        str(ROOT / "launch/doctor_checks/trial_rank.py"),
        str(folder / "order.json"),
    ]
    env = cpu_env(trial.recipe.learner.threads) | {"PYTHONPATH": module_path(), "TOKENIZERS_PARALLELISM": "false"}
    child = start_family("trial", command, log, env=env)
    try:
        how = watch(child, follow, STAGE_S, trial.recipe.engine.start_limit_s, tell)
    except BaseException:  # the doctor was stopped
        end(child)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    end(child)
    follow.read()
    if how and not follow.failed:
        stage = follow.stage or next((name for name in STAGES if name not in follow.findings), "checkpoint")
        follow.findings[stage] = failed(f"trial: {stage}", f"{how}; {last_lines(log, 3)}", STAGES[stage])
    for stage in STAGES:
        missing = not_checked(f"trial: {stage}", "an earlier stage failed")
        findings.append(follow.findings.get(stage, missing))
    if how:
        findings.append(ok("trial: log", str(log)))
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return findings


def watch(child: Child, follow: TrialProgress, stage_s: float, start_s: float, tell: Callable[[str], None]) -> str:
    """Wait until the process has ended or a stage takes too long; return what went wrong, in words, or ""."""
    last = ""
    while True:
        how = how_it_ended(child)
        follow.read()
        if follow.stage and follow.stage != last:
            tell(last := follow.stage)
        if how:
            return "" if child.process.returncode == 0 else f"its process {how}"
        limit_s = stage_s + (start_s if follow.stage == "engine" else 0.0)
        if time.monotonic() - follow.since > limit_s:
            return f"no end within {limit_s:g} s"
        time.sleep(0.05)


def end(child: Child) -> None:
    """Stop the process with SIGTERM, which ends the engine, too; kill it if that takes too long."""
    if child.process.poll() is None:
        child.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(LEAVE_S)
    child.kill()
