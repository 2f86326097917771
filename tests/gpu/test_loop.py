"""The whole loop on one GPU: learner, engine and actors as processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launch.doctor_checks.trial_runner import STAGES
from tests.support.runs import finished, local, metrics, places

SHARED = {"engine.device": "cuda", "engine.shares_gpu": "true", "engine.mem_fraction": 0.3}


@pytest.mark.parametrize(
    "engine", [SHARED, {"engine.device": "cpu"}], ids=["engine on the same GPU", "engine on the CPU"]
)
def test_a_learner_on_the_gpu_learns_to_name_colours(tmp_path, engine):
    fields = {"learner.device": "cuda", "model.dtype": "bfloat16", "learner.optimizer.warmup_steps": 10} | engine
    run = finished(local(places(tmp_path, **fields)), timeout_s=200)
    result = json.loads(run.stdout.splitlines()[-1])
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    assert 0.1 < result["success_before"] < 0.5 and result["success_after"] >= 0.8, result
    published = [row for row in metrics(tmp_path) if "publish/engines" in row]
    assert all(row["publish/engines"] == 1 and not row.get("publish/unproven") for row in published) and published
    assert max(row["behaviour/logprob_gap/lag_0"] for row in rows if "behaviour/logprob_gap/lag_0" in row) < 0.2


def test_the_doctor_finds_one_shared_gpu_well(tmp_path):
    recipe = "launch/recipes/geo3k_multi_turn_one_gpu.toml"
    command = [sys.executable, "launch/doctor.py", "--json", "--config", recipe, "--run.dir", str(tmp_path / "runs")]
    done = subprocess.run([*command, *places(tmp_path / "runs")[2:]], capture_output=True, text=True, timeout=280)
    found = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    stages = [found[f"trial: {stage}"] for stage in STAGES]
    bad = [stage for stage in stages if stage["state"] != "ok"]
    assert not bad, json.dumps(bad)
    assert "on cuda" in stages[0]["found"] and "on cuda" in stages[1]["found"]
