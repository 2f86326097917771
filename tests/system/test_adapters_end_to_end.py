"""Environments of other kinds in whole runs: 200 episodes each; and a server that is killed while a run plays on it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.env_servers import COUNTING, served_apart
from tests.support.runs import command, finished, metrics, places

pytestmark = pytest.mark.slow
STEPS, GROUPS, GROUP = 5, 10, 4  # 200 episodes
LEARNER = {"total_steps": STEPS, "groups_per_step": GROUPS, "group_size": GROUP, "checkpoint.every": STEPS}
WORDS = ["red", "green", "blue", "yellow"]  # that the model knows
LAKE = {"id": "FrozenLake-v1", "kwargs": {"desc": ["SFG"]}, "actions": WORDS, "image_size": [32, 32], "text": ""}


def run_of(tmp_path: Path, module: str, args: dict[str, Any], **more: Any) -> list[str]:
    fields = {f"learner.{name}": value for name, value in LEARNER.items()} | {"eval.samples": 0}
    fields |= {"env.module": module, "env.args": json.dumps(args | {"system_prompt": "Play."})}
    fields |= {"env.max_turns": 2, "env.max_tokens": 8, "model.max_context": 512}
    return command("local", places(tmp_path, **fields | more))


def told(tmp_path: Path, name: str) -> list[float]:
    return [row.get(name, 0.0) for row in metrics(tmp_path) if "rollout/reward" in row]


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("envs.gymnasium", LAKE),
        ("envs.gymnasium", LAKE | {"render": "text"}),
        ("envs.vagen", {"env": "tests/data/user_code/vagen_style.py:Dot"}),
        ("envs.verifiers", {"env": "tests/data/user_code/verifiers_style.py", "args": {"kind": "single"}}),
    ],
    ids=["gymnasium", "gymnasium as text", "vagen", "verifiers"],
)
def test_two_hundred_episodes_of_another_kind_of_environment_are_trained_on(tmp_path, module, args):
    result = json.loads(finished(run_of(tmp_path, module, args)).stdout.splitlines()[-1])
    assert (result["optimizer_steps"], result["episodes"]) == (STEPS, STEPS * GROUPS * GROUP)
    assert told(tmp_path, "rollout/failed") == [0.0] * STEPS


def open_sessions(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
        return int(json.load(answer)["sessions"])


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    (tmp_path / "counting.py").write_text(COUNTING.replace('{"boom": lambda: 1 / 0}.get(text, int)()', "0"))
    return tmp_path / "counting.py"


@pytest.mark.usefixtures("forked_starts")
def test_two_hundred_episodes_of_a_served_environment_are_trained_on(tmp_path, counting):
    process, url = served_apart(counting)
    try:
        result = json.loads(finished(run_of(tmp_path, "envs.remote", {"url": url})).stdout.splitlines()[-1])
        assert result["episodes"] == STEPS * GROUPS * GROUP and told(tmp_path, "rollout/failed") == [0.0] * STEPS
    finally:
        process.kill()


@pytest.mark.usefixtures("forked_starts")
def test_a_server_killed_in_mid_run_ends_its_episodes_as_env_error_and_the_run_goes_on(tmp_path, counting):
    servers = [served_apart(counting, "--env.args.nap_s", "0.5") for _ in range(2)]
    try:
        args = {"url": [url for _, url in servers], "tries": 2}
        started = run_of(tmp_path, "envs.remote", args, **{"env.threads": 16, "learner.total_steps": 8})
        with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            deadline = time.monotonic() + 200
            begun = tmp_path / "colour_tiny" / "metrics.jsonl"
            while not begun.exists() or not told(tmp_path, "step") or open_sessions(servers[0][1]) < 4:
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            servers[0][0].kill()  # amid its episodes
            out, log = run.communicate(timeout=250)
        assert run.returncode == 0, log[-3000:]
        assert json.loads(out.splitlines()[-1])["optimizer_steps"] == 8
        assert sum(told(tmp_path, "arrived/ending/env_error")) > 0
        assert f"each further failure like it is only counted: EnvServerError: {servers[0][1]}: cannot connect" in log
    finally:
        for process, _ in servers:
            process.kill()
