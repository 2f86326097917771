"""Ctrl-C in a terminal, at any moment: no traceback, no process left, and the last line says how to go on."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from launch.processes.torchrun import EXIT_STOPPED
from tests.support.runs import local, metrics, places

pytestmark = pytest.mark.slow
LIMIT_S = 120.0
MARK = "TEST_TERMINAL_FOLDER"  # a variable that all processes of a command inherit


class Terminal:
    """A command in a terminal of its own, in whose foreground it is."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.output = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # children of a shell's background jobs ignore it
            os.environ |= {"TERM": "xterm", MARK: str(folder)}
            os.execv(arguments[0], arguments)

    def read(self, seconds: float) -> bool:
        """Read output for at most some seconds; return False at its end."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            part = os.read(self._fd, 65536)
        except OSError:  # the last process that had the terminal is gone
            return False
        self.output += part
        return bool(part)

    def press_ctrl_c(self) -> None:
        os.write(self._fd, b"\x03")

    def wait(self) -> int:
        """Read to the end; return the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.read(1.0):
            assert time.monotonic() < deadline, self.text[-3000:]
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of processes that were started for a run in this folder."""
    commands = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                commands.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return commands


def until_gone(folder: Path) -> list[str]:
    deadline = time.monotonic() + 20
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize("after_s", [0.4, 1.5, 3.0, 6.0, 10.0, 15.0])
def test_ctrl_c_at_any_moment_prints_no_traceback_and_leaves_no_process(tmp_path: Path, after_s: float) -> None:
    terminal = Terminal(local(places(tmp_path, **{"learner.total_steps": 500, "eval.samples": 8})), tmp_path)
    until = time.monotonic() + after_s
    while time.monotonic() < until:
        terminal.read(until - time.monotonic())
    terminal.press_ctrl_c()
    code = terminal.wait()
    assert code == (EXIT_STOPPED if after_s > 1.0 else code) and code != 0
    if after_s > 1.0:  # before its own first line Python itself tells of an interrupt
        assert "Traceback" not in terminal.text and "race condition" not in terminal.text, terminal.text[-3000:]
    assert until_gone(tmp_path) == []


def test_a_second_ctrl_c_changes_nothing(tmp_path: Path) -> None:
    terminal = Terminal(local(places(tmp_path, **{"learner.total_steps": 500, "eval.samples": 0})), tmp_path)
    wait_for_steps(terminal, tmp_path, 3)
    assert len(processes_in(tmp_path)) > 3  # launcher, learner, engine and actors
    for _ in range(3):
        terminal.press_ctrl_c()
        terminal.read(0.3)
    assert terminal.wait() == EXIT_STOPPED
    assert "Traceback" not in terminal.text and "race condition" not in terminal.text
    assert until_gone(tmp_path) == []


def test_the_last_line_names_the_checkpoint_and_how_to_go_on_and_that_works(tmp_path: Path) -> None:
    fields = places(tmp_path, **{"learner.total_steps": 500, "eval.samples": 0})
    terminal = Terminal(local(fields), tmp_path)
    wait_for_steps(terminal, tmp_path, 3)
    terminal.press_ctrl_c()
    assert terminal.wait() == EXIT_STOPPED
    (checkpoint,) = (tmp_path / "colour_tiny" / "checkpoints").glob("step_*")
    line = next(line for line in terminal.text.splitlines() if "asked to shut down" in line)
    assert f"checkpoint {checkpoint.name} is written" in line
    assert "the same command with --learner.resume auto goes on from there" in line
    step = int(checkpoint.name.removeprefix("step_"))
    resumed = [*fields, "--learner.resume", "auto", "--learner.total_steps", str(step + 1)]
    ended = subprocess.run(local(resumed), capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert [row["step"] for row in metrics(tmp_path) if "rollout/reward" in row][-1] == step + 1


def test_ranks_under_torchrun_in_a_terminal_print_no_traceback(tmp_path: Path) -> None:
    arguments = places(tmp_path, **{"learner.wait_timeout_s": 300})
    torchrun = [sys.executable, "launch/processes/torchrun.py", "--standalone", "--nproc-per-node=2"]
    terminal = Terminal(
        [*torchrun, "launch/learner.py", "--config", "launch/recipes/colour_tiny.toml", *arguments], tmp_path
    )
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "colour_tiny" / "status.json").exists():
        assert time.monotonic() < deadline
        terminal.read(0.5)
    until = time.monotonic() + 6
    while time.monotonic() < until:
        terminal.read(0.2)
    terminal.press_ctrl_c()
    assert terminal.wait() not in (0, -signal.SIGINT)
    assert "Traceback" not in terminal.text and "race condition" not in terminal.text, terminal.text[-3000:]
    assert until_gone(tmp_path) == []


def wait_for_steps(terminal: Terminal, runs: Path, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    path = runs / "colour_tiny" / "metrics.jsonl"
    while not path.exists() or sum("rollout/reward" in row for row in metrics(runs)) < count:
        assert time.monotonic() < deadline, terminal.text[-3000:]
        terminal.read(0.2)
