"""Processes: a host that falls sick beside sound ones, and hosts that were started with other settings or files."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine import until
from tests.support.runs import command, metrics, places

STEPS = 150  # long enough for a sick host to bring what judges it
NEEDS_A_FILE = '''
"""The colour task, whose levels lie in a file of each host."""
import os
from pathlib import Path

from envs.colour import *  # noqa: F403
from envs.colour import build_env as build_colour


class Env:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def reset(self):
        Path(os.environ["PRONK_TEST_LEVELS"]).read_text()
        return self.inner.reset()


def build_env(sample=None, args=None, **_):
    return Env(build_colour(sample=sample, args=args))
'''


class Hosts:
    """Learner and launchers of actors as processes, each with a log of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, script: str, arguments: list[str], **env: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                command(script, arguments), stdout=log, stderr=log, env=os.environ | env
            )
        return self.running[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    yield hosts
    for process in hosts.running.values():
        if process.poll() is None:
            process.terminate()
            process.wait(20)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_host_that_loses_a_file_is_named_and_the_run_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    module = tmp_path / "needs_a_file.py"
    module.write_text(NEEDS_A_FILE)
    fields = {"env.module": module, "learner.total_steps": STEPS, "eval.samples": 0, "actor.groups": 8}
    arguments = places(tmp_path, **fields)
    levels = {name: tmp_path / f"{name}.levels" for name in ("sound1", "sound2", "sick")}
    for path in levels.values():
        path.write_text("levels")
    learner = hosts.start("learner", "learner", arguments, PRONK_TEST_LEVELS=str(levels["sound1"]))
    for number, (name, path) in enumerate(levels.items()):
        own = arguments if number == 0 else [*arguments, "--engine.count", "0"]
        hosts.start(name, "actors", own, PRONK_TEST_LEVELS=str(path))
    until(lambda: hosts.log("learner").count(" is here, with") >= 3 or learner.poll() is not None, 240)
    until(lambda: (tmp_path / "colour_tiny" / "metrics.jsonl").exists() or learner.poll() is not None, 240)
    levels["sick"].unlink()
    assert learner.wait(300) == 0, hosts.log("learner")[-3000:]
    assert [hosts.running[name].wait(60) for name in levels] == [0, 0, 0]
    pauses = re.findall(r"actor (\S+) gets no tickets for (\d+) s: .*", hosts.log("learner"))
    assert len({actor for actor, _ in pauses}) == 1
    assert [int(seconds) for _, seconds in pauses] == [10 * 2**i for i in range(len(pauses))]
    assert "FileNotFoundError" in hosts.log("learner") and "sick.levels" in hosts.log("learner")
    last = metrics(tmp_path)[-1]
    assert last["tickets/dropped"] == 0
    assert last["tickets/retried/env_error"] > 0
    assert last["tickets/trained"] == STEPS * 16
    lines = (tmp_path / "colour_tiny" / "ledger.jsonl").read_text().splitlines()
    trained = [number for line in lines for number in json.loads(line)["tickets"]]
    assert len(trained) == len(set(trained)) == STEPS * 16


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_host_with_other_settings_or_an_old_file_is_refused_by_the_name_of_what_differs(
    hosts: Hosts, tmp_path: Path
) -> None:
    new, old = tmp_path / "new" / "task.py", tmp_path / "old" / "task.py"
    for path in (new, old):
        path.parent.mkdir()
        path.write_text("from envs.colour import *\nfrom envs.colour import build_env\n")
    old.write_text(old.read_text() + "REWARD_OF_THE_WRONG_COLOUR = 1\n")
    arguments = places(tmp_path, **{"learner.total_steps": 20, "eval.samples": 0, "env.module": new})
    learner = hosts.start("learner", "learner", arguments)
    alone = ["--engine.count", "0"]
    hosts.start("old", "actors", [*arguments, *alone, "--env.module", str(old)])
    hosts.start("turns", "actors", [*arguments, *alone, "--env.max_turns", "3"])
    hosts.start("other", "actors", [*arguments, "--env.timeout_s", "50", "--run.name", "other"])
    assert hosts.running["old"].wait(240) == hosts.running["turns"].wait(240) == 3
    assert learner.wait(240) == hosts.running["other"].wait(60) == 0
    for name, words in (
        ("old", f"env.module: the learner has {new} (source "),
        ("turns", "env.max_turns: the learner has 1, actor "),
    ):
        (line,) = [line for line in hosts.log(name).splitlines() if "the learner says stop: " in line]
        assert words in line
        assert "Traceback" not in hosts.log(name)
    assert str(old) in hosts.log("old")
    assert "env.module: the learner has" in hosts.log("learner")
