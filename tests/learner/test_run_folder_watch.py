"""A run whose folder was moved or deleted ends, and makes no second folder without a lock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.engines.network import free_port
from launch.processes.run_folder import lock
from learner.run_folder_watch import RunFolderWatch
from shared.run_status import StatusFile, read_status
from tests.support.machine import until


def delete(run: Path) -> None:
    """Delete a folder into which somebody writes meanwhile."""
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)


MOVES = {
    "moved": lambda run: run.rename(run.with_name("elsewhere")),
    "deleted": delete,
    "lock deleted": lambda run: (run / "learner.lock").unlink(),
    "replaced": lambda run: (run.rename(run.with_name("elsewhere")), run.mkdir(), lock(run).close()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_folder_that_is_no_longer_there_is_noticed(tmp_path: Path, move: str) -> None:
    run = tmp_path / "run"
    held = lock(run)
    watch, status = RunFolderWatch(run), StatusFile(run)
    watch.check()
    (run / "checkpoints").mkdir()
    watch.check()
    MOVES[move](run)
    with pytest.raises(ValueError, match=r"run was moved or deleted.*start the run again"):
        watch.check()
    if move == "replaced":
        status.end("failed", "of the run that stood here before")
        assert read_status(run) is None
    held.close()


@pytest.mark.slow
@pytest.mark.parametrize("move", ["moved", "deleted"])
def test_a_run_whose_folder_is_moved_ends_with_one_line(tmp_path: Path, move: str) -> None:
    run, port = tmp_path / "runs/moved", free_port()
    words = [
        *("--run.dir", str(run.parent), "--run.name", run.name, "--learner.total_steps", "1000"),
        *("--learner.checkpoint.every", "2", "--learner.bind", f"tcp://127.0.0.1:{port}"),
        *("--actor.learner", f"tcp://127.0.0.1:{port}", "--engine.port", str(free_port()), "--eval.samples", "0"),
    ]
    command = [sys.executable, "launch/local.py", "--config", "launch/recipes/colour_tiny.toml", *words]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        metrics = run / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 120)
        MOVES[move](run)
        code = process.wait(60)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)
    text = (tmp_path / "log").read_text()
    assert code not in (0, 130), text
    assert text.count("was moved or deleted while the run was training") >= 1 and "Traceback" not in text
    assert not run.exists(), "a second folder, without a lock"
