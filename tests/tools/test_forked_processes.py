"""Programs that are forked from a process with torch and transformers are processes like all others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from actor.isolation.lifeline import die_with_parent
from tests.support.actor_rig import Learner, actor_process
from tests.support.forked import order_of
from tests.support.machine import children_of, is_there, until
from tests.support.runs import command, local, places, refused


def has_torch(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def with_torch(pid: int) -> list[int]:
    """Of all descendants."""
    return [child for child in children_of(pid) if has_torch(child)]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_forked_program_is_a_child_of_whoever_starts_it_and_ends_by_a_signal() -> None:
    with closing(Learner()) as learner, actor_process(learner) as process:
        parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
        assert int(parent) == os.getpid()
        assert has_torch(process.pid)  # an actor never imports it
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_arguments_environment_folder_streams_and_exit_code_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "learner.lrr" in refused(command("learner", places(tmp_path, **{"learner.lrr": 1})))[0]
    with monkeypatch.context() as patch:
        patch.setenv("PRONK_LEARNER__OBJECTIVE__NAME", "trpo")
        assert "'trpo'" in refused(local(places(tmp_path)))[0]
    arguments = [sys.executable, os.path.abspath("launch/learner.py"), "--config", "recipe.toml"]
    ended = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "error: " in ended.stderr and "recipe.toml" in ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_launchers_own_children_are_forked_too_and_end_with_it(tmp_path: Path) -> None:
    launcher = subprocess.Popen(local(places(tmp_path)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:  # learner, actors, engine, and what forks for the two launchers: of these, two would import torch themselves
        until(lambda: launcher.poll() is not None or len(with_torch(launcher.pid)) >= 5, 120)
        assert launcher.poll() is None
        family = children_of(launcher.pid)
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not any(is_there(pid) for pid in family), 120)


@pytest.mark.parametrize(
    "program",
    [
        [sys.executable, "-c", "launch/learner.py"],
        [sys.executable, "-m", "torch.distributed.run", "launch/learner.py"],
        [sys.executable, "-m", "tests.chaos.engines"],
        [sys.executable, "-m", "learner.export_of_another"],
        ["python-of-another-environment", "launch/learner.py"],
        "launch/learner.py",
    ],
)
def test_other_programs_start_as_usual(program: str | list[str]) -> None:
    assert order_of(program, None, None, None, False) is None


def test_what_cannot_be_sent_to_another_process_is_called_as_usual() -> None:
    """A function that a new process calls before anything else."""
    program = command("learner", [])
    assert order_of(program, die_with_parent, None, None, False) is not None
    assert order_of(program, lambda: None, None, None, False) is None
