"""The example of the page on agents, really trained: an actor serves it, an engine answers it, a learner learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from shared.recordings.reader import read_step, steps
from tests.support.runs import local, metrics, places

# What the example uses of the package openai, which is not among those that Pronk needs.
CLIENT = '''
"""A client of OpenAI's API: as much of it as one example uses."""

from types import SimpleNamespace

import aiohttp


class AsyncOpenAI:
    def __init__(self, base_url, api_key):
        self.base_url, self.headers = base_url, {"authorization": f"Bearer {api_key}"}
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def __aenter__(self):
        self.session = aiohttp.ClientSession(headers=self.headers)
        return self

    async def __aexit__(self, *_):
        await self.session.close()

    async def create(self, **body):
        async with self.session.post(f"{self.base_url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            (choice,) = (await answer.json())["choices"]
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(**choice["message"]))])
'''


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_the_example_of_an_agent_is_trained_on(tmp_path: Path) -> None:
    page = Path("docs/how-to/agents.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert example
    agent = tmp_path / "my_agent.py"
    agent.write_text(example[1])
    (tmp_path / "openai.py").write_text(CLIENT)
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
