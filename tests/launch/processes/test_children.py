"""What a process that Pronk starts gets from the one that starts it, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.processes import children
from launch.processes.children import ROOT, start
from tests.support.machine import until


@pytest.mark.slow
def test_a_process_imports_the_repositorys_modules_and_those_that_the_user_has_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code = "import sys, of_the_user, shared.config.recipe; sys.exit(shared.config.recipe.__file__ != sys.argv[1])"
    child = start("child", [sys.executable, "-P", "-c", code, str(ROOT / "shared/config/recipe.py")])
    assert child.process.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["launch/learner.py"], ["launch/local.py"], ["-m", "envs.check"], ["-c", "import tests.support.runs"]],
    ids=" ".join,
)
def test_packages_of_the_user_with_the_names_of_our_folders_are_in_nobodys_way(
    tmp_path: Path, command: list[str]
) -> None:
    """ROS has a package `launch`, and some distributions install `tests`."""
    for name in ("actor", "envs", "kernels", "launch", "learner", "shared", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(1)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, env=env, capture_output=True, timeout=100)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]


CAREFREE = """
import signal
from launch.processes.children import Stopped, raise_on_signals
raise_on_signals()
try:
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception:
        print("lost")
except Stopped as number:
    print(number)
"""


def test_what_a_signal_raises_is_not_lost_in_code_that_catches_every_exception() -> None:
    ended = subprocess.run([sys.executable, "-c", CAREFREE], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "SIGTERM\n"


LOST = """
import signal, sys
from launch.processes.children import run_program, start, wait_for_any
class Careless:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # Python drops what a finalizer raises
def main():
    child = start("child", [sys.executable, "-c", "import time; time.sleep(60)"])
    thing = Careless()
    del thing
    wait_for_any([child], lambda: None)
run_program(main)
"""


def test_a_signal_whose_exception_is_lost_in_a_finalizer_ends_the_program_at_its_next_wait() -> None:
    ended = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 130 and "SIGINT: stopping" in ended.stderr


HELD = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.raise_signal(signal.SIGTERM)
print("imported", flush=True)
from launch.processes.children import run_program
run_program(lambda: print("begun"))
"""


def test_a_signal_that_was_blocked_while_modules_were_imported_stops_the_program_before_it_begins() -> None:
    ended = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 130 and ended.stdout == "imported\n" and "SIGTERM: stopping" in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
@pytest.mark.parametrize(("parent", "code"), [("os.getppid()", 0), ("1 + os.getppid()", 1)])
def test_a_child_whose_parent_has_ended_before_it_could_heed_that_ends_at_once(parent: str, code: int) -> None:
    program = f"import os\nfrom actor.isolation.lifeline import die_with_parent\ndie_with_parent(parent={parent})"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == code


@pytest.mark.slow
def test_a_child_that_has_longer_to_leave_is_waited_for_and_the_others_are_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(children, "TERMINATE_S", 0.2)
    code = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
    places = [tmp_path / name for name in ("patient", "hasty")]
    started = [
        start(place.name, [sys.executable, "-c", code, str(place)], leave_s=leave_s)
        for place, leave_s in zip(places, (30.0, None), strict=True)
    ]
    until(lambda: all(place.exists() for place in places))
    children.stop_all(started, last=False)
    assert [child.process.returncode for child in started] == [7, -signal.SIGKILL]


class Held:
    """A process that the kernel does not let go."""

    pid = 4242

    def kill(self):
        self.killed = True

    def wait(self, timeout):
        raise subprocess.TimeoutExpired("engine", timeout)


def test_a_process_that_outlives_sigkill_is_named_and_left_behind(caplog):
    held = Held()
    children.Child("engine on port 7", held).kill()
    assert held.killed and "engine on port 7 (pid 4242) has not ended 60 s after SIGKILL" in caplog.text
