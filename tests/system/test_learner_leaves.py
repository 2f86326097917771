"""A learner that is asked to leave or killed, and returns: its actors wait for it and keep their groups."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.shutdown import Shutdown
from shared.types import Stop
from tests.support.machine import until
from tests.support.runs import command, metrics, places

STEPS = 16
FIELDS = {"learner.total_steps": STEPS, "learner.checkpoint.every": 4, "learner.resume": "auto", "eval.samples": 0}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.wait(20)


def launch(script: str, arguments: list[str], started: list[subprocess.Popen]) -> subprocess.Popen:
    started.append(subprocess.Popen(command(script, arguments), stdout=subprocess.DEVNULL))
    return started[-1]


def steps(tmp_path: Path) -> list[int]:
    if not (tmp_path / "colour_tiny" / "metrics.jsonl").exists():
        return []
    return [row["step"] for row in metrics(tmp_path) if "rollout/reward" in row]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_learner_that_went_resumes_with_the_actors_that_waited(
    tmp_path: Path, started: list[subprocess.Popen], number: signal.Signals
) -> None:
    arguments = places(tmp_path, **FIELDS)
    actors = launch("actors", arguments, started)
    learner = launch("learner", arguments, started)
    checkpoints = tmp_path / "colour_tiny" / "checkpoints"
    deadline = time.monotonic() + 120
    # A checkpoint is written beside the steps that follow: on a slow machine the first comes late.
    while len(steps(tmp_path)) < 6 or not list(checkpoints.glob("step_*")):
        assert learner.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    learner.send_signal(number)
    assert learner.wait(30) == (130 if number is signal.SIGTERM else -9)
    done = steps(tmp_path)[-1]
    kept = sorted(checkpoints.glob("step_*"))[-1]
    if number is signal.SIGTERM:
        assert kept.name == f"step_{done:08d}"
    assert actors.poll() is None
    again = launch("learner", arguments, started)
    assert again.wait(150) == 0
    assert actors.wait(60) == 0
    first = int(kept.name.removeprefix("step_"))
    assert steps(tmp_path)[-(STEPS - first) :] == list(range(first + 1, STEPS + 1))
    last = metrics(tmp_path)[-1]
    assert json.loads((tmp_path / "colour_tiny" / "result.json").read_text())["optimizer_steps"] == STEPS
    assert last["tickets/trained"] == STEPS * 16
    assert last["tickets/issued"] == last["tickets/trained"] + last["tickets/dropped"] + last["tickets/open"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_learner_that_still_waits_for_engines_leaves_at_once(tmp_path: Path, number: signal.Signals) -> None:
    arguments = command("learner", places(tmp_path))
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as learner:
        try:
            address = arguments[arguments.index("--learner.bind") + 1].removeprefix("tcp://")
            until(lambda: learner.poll() is not None or listens(address), 120)
            time.sleep(0.5)  # what is built after the address is taken
            learner.send_signal(number)
            _, told = learner.communicate(timeout=20)  # less than learner.leave_timeout_s
        finally:
            learner.kill()
    assert learner.returncode == 130, told


def listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


def test_what_actors_are_told_depends_on_how_the_learner_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown = Shutdown(60.0)
    assert shutdown.stop_message(complete=True) == Stop("the run is complete")
    assert shutdown.stop_message(complete=False) == Stop("the learner failed", True)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert shutdown.stop_message(complete=False) is None
    shutdown.signal = signal.SIGTERM
    assert shutdown.stop_message(complete=False) is None
    shutdown.signal = signal.SIGINT
    assert shutdown.stop_message(complete=False) == Stop("the learner was stopped by SIGINT", True)


def test_a_learner_that_does_not_leave_in_time_is_ended() -> None:
    code = """
import signal, time
from learner.shutdown import Shutdown
with Shutdown(0.2):
    signal.raise_signal(signal.SIGTERM)
    time.sleep(30)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert "leave_timeout_s = 0.2" in run.stderr + run.stdout


@pytest.mark.parametrize(("progress", "code"), [("itertools.count().__next__", 7), ("lambda: 5", 1)])
def test_a_checkpoint_that_grows_is_waited_for_and_one_that_does_not_is_none(progress: str, code: int) -> None:
    program = f"""
import itertools, os, signal, time
import learner.shutdown
learner.shutdown.PROGRESS_S = 0.2
with learner.shutdown.Shutdown(0.1) as leave:
    leave.watch_progress({progress})
    signal.raise_signal(signal.SIGTERM)
    time.sleep(2 if {code} == 7 else 30)
    os._exit(7)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == code, run.stderr
    assert "a checkpoint is still being written" in run.stderr + run.stdout


STUCK = """
import ctypes, os, signal, threading
from launch.processes.children import raise_on_signals
from learner.shutdown import Shutdown
raise_on_signals()
leave = Shutdown({within_s})
leave.guard()
{enter}
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second waits in C for ever, as a collective does; no handler of Python's runs
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(
    ("within_s", "enter", "limit"),
    [(0.2, "leave.__enter__()", "learner.leave_timeout_s = 0.2"), (600.0, "", "the seconds that a start has: 3")],
)
def test_a_rank_that_waits_for_a_dead_one_is_ended_in_time(within_s: float, enter: str, limit: str) -> None:
    code = STUCK.format(within_s=within_s, enter=enter)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert f"not gone within {limit}" in run.stderr + run.stdout
