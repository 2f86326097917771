"""Agents elsewhere, as processes of their own: the example of the page leases from launch/agents.py and plays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from launch.engines.network import free_port
from shared.keys import make_api_key
from shared.recordings.group_files import files, read
from shared.types import Ending
from tests.support.remote_agents import call, lease
from tests.support.runs import command, places, refused


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_agents_of_other_processes_play_what_they_lease_and_one_that_vanishes_is_an_ending(tmp_path: Path) -> None:
    page = Path("docs/how-to/agents.md").read_text()
    example = re.search(r"```python\n(# elsewhere.py\n.*?)```", page, re.DOTALL)
    assert example
    (tmp_path / "elsewhere.py").write_text(example[1])
    (key_file,) = make_api_key(tmp_path / "keys")
    key, port = key_file.read_text().strip(), free_port()
    url, folder = f"http://127.0.0.1:{port}", tmp_path / "groups"
    fields = {"rollout.listen": f"127.0.0.1:{port}", "rollout.api_key_file": key_file, "env.timeout_s": 5}
    fields |= {"learner.groups_per_step": 4, "learner.total_steps": 1, "actor.groups": 4}
    host = subprocess.Popen(
        [*command("agents", places(tmp_path, **fields)), "--record", str(folder)], stderr=subprocess.PIPE, text=True
    )
    agents: list[subprocess.Popen[bytes]] = []
    try:
        until = time.monotonic() + 120
        while True:  # until it listens
            try:
                assert call(f"{url}/lease", {"wait_s": 0}, key="wrong")[0] == 401
                break
            except OSError:
                assert time.monotonic() < until and host.poll() is None
                time.sleep(0.2)
        vanishing = lease(url, key=key)  # and never a word again
        environ = {**os.environ, "PRONK_KEY": key, "no_proxy": "*"}
        for _ in range(2):
            agents.append(subprocess.Popen([sys.executable, str(tmp_path / "elsewhere.py"), url], env=environ))
        _, stderr = host.communicate(timeout=200)
    finally:
        for process in [host, *agents]:
            process.kill()
            process.wait()
    assert host.returncode == 0, stderr[-3000:]
    assert vanishing["lease_s"] == 5.0
    played = [each for path in files(folder) for each in read(path).trajectories]
    endings = Counter(each.ending for each in played)
    assert endings.pop(Ending.AGENT_GONE) == 1 and sum(endings.values()) == 15
    assert set(endings) <= {Ending.COMPLETED, Ending.OUT_OF_TOKENS}, [each.error for each in played]
    assert all(each.reward in (0.0, 1.0) and len(each.turns) == 1 for each in played if each.trainable)


def test_an_address_off_loopback_needs_a_key(tmp_path: Path) -> None:
    line, _ = refused(command("agents", places(tmp_path, **{"rollout.listen": "0.0.0.0:8600"})))
    assert "rollout.listen = '0.0.0.0:8600' is not loopback, and there is no key" in line
    line, _ = refused(command("agents", places(tmp_path, **{"rollout.listen": "8600"})))
    assert "write it as HOST:PORT" in line
