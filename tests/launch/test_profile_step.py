"""`pronk profile`: a learner that trains is profiled and goes on; any other folder gets one line."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.profile_step import main
from learner.run_folder_watch import LOCK
from tests.support.machine import until
from tests.support.runs import finished, local, metrics, places


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_running_learner_is_profiled_and_trains_on(tmp_path: Path) -> None:
    fields = {"learner.total_steps": 100_000, "eval.samples": 0}
    process = subprocess.Popen(local(places(tmp_path, **fields)), stderr=subprocess.DEVNULL)
    run = tmp_path / "colour_tiny"
    try:
        until(lambda: (run / "metrics.jsonl").exists() and len(metrics(tmp_path)) > 0, 120)
        done = finished([sys.executable, "launch/profile_step.py", str(run)])
        path = Path(done.stdout.strip())
        step = int(path.name.split("_")[1])
        names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert path.parent == run / "profiles" and "aten::linear" in names
        until(lambda: metrics(tmp_path)[-1]["step"] > step, 120)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        if process.poll() is None:
            process.kill()


def said(capsys: pytest.CaptureFixture[str], run: Path, *more: str) -> str:
    assert main([str(run), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_in_which_nobody_trains_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"has no {LOCK}" in said(capsys, tmp_path)
    for content in ("", "process 1 on\n", f"process {os.getpid()} on {socket.gethostname()}\n"):
        (tmp_path / LOCK).write_text(content)
        assert "no learner trains in" in said(capsys, tmp_path)


def test_no_process_is_signalled_that_would_end_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with (tmp_path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for process, host, words in (
                (sleeper.pid, "elsewhere", "is on elsewhere: run this command there"),
                (sleeper.pid, socket.gethostname(), "does not heed SIGUSR1 yet"),
            ):
                (tmp_path / LOCK).write_text(f"process {process} on {host}\n")
                assert words in said(capsys, tmp_path)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait(20)


HEEDS = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None); print('ready', flush=True); input()"


def test_a_step_that_does_not_end_is_waited_for_no_longer_than_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    learner = subprocess.Popen([sys.executable, "-c", HEEDS], text=True, **pipes)
    try:
        assert learner.stdout and learner.stdout.readline() == "ready\n"
        with (tmp_path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (tmp_path / LOCK).write_text(f"process {learner.pid} on {socket.gethostname()}\n")
            assert main([str(tmp_path), "--wait", "0.3"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"process {learner.pid}, has completed no step within 0.3 s" in line
    finally:
        learner.kill()
        learner.wait(20)
