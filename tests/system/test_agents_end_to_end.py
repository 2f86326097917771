"""The example of the page on agents, really trained: an actor serves it, an engine answers it, a learner learns."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from shared.recordings.reader import read_step, steps
from tests.support.agent_examples import example_agent
from tests.support.runs import local, metrics, places


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_the_example_of_an_agent_is_trained_on(tmp_path: Path) -> None:
    agent = example_agent("docs/how-to/agents.md", tmp_path)
    fields = {"rollout.agent": f"{agent}:run", "learner.total_steps": 2, "eval.samples": 0, "record.every": 1}
    fields |= {"learner.groups_per_step": 8, "actor.groups": 8}
    run = subprocess.run(
        local([*places(tmp_path, **fields)]),
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1])["optimizer_steps"] == 2
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    assert len(rows) == 2 and all(0.0 < row["rollout/reward"] < 1.0 for row in rows)
    for row in rows:
        assert row["rollout/turns"] == row["rollout/agent_segments"] == 1.0 and row["rollout/agent_refused"] == 0.0
        assert row["rollout/failed"] == 0.0 and row.get("behaviour/logprob_gap/lag_0", 0.0) < 1e-4
    recorded = [read_step(path) for path in steps(tmp_path / "colour_tiny" / "recordings")]
    assert recorded and not any(each.damages for each in recorded)
    assert np.isfinite([row["optim/grad_norm"] for row in rows]).all()
