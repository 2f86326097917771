"""Runs commands on small recipes (by default the colour task's), in the test's own folder and on its own ports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

from launch.engines.network import free_port

RECIPE = "launch/recipes/colour_tiny.toml"

LEARNING_S = 800.0  # limit of a whole training of a small model on a slow machine


def places(tmp_path: Path, **more: object) -> list[str]:
    """Return overrides for the run's folder and ports that keep two runs on one machine apart."""
    address = f"tcp://127.0.0.1:{free_port()}"
    fields = {"run.dir": tmp_path, "learner.bind": address, "actor.learner": address, "engine.port": free_port()}
    return [part for key, value in {**fields, **more}.items() for part in (f"--{key}", str(value))]


def command(script: str, arguments: list[str], recipe: str = RECIPE) -> list[str]:
    return [sys.executable, f"launch/{script}.py", "--config", recipe, *arguments]


def local(arguments: list[str]) -> list[str]:
    return command("local", arguments)


def finished(arguments: list[str], timeout_s: float = 250) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, check that it succeeded, and return it."""
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


def refused(arguments: list[str], codes: Container[int] = (2,)) -> tuple[str, str]:
    """Run a command that must fail with one of `codes`; return its one-line error, and its whole stderr."""
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=250)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")] or [ended.stderr[-3000:]]
    assert ended.returncode in codes, line
    assert ended.stderr.count("Traceback") == ended.stderr.count("Traceback of the user's code:")
    return line, ended.stderr


def metrics(tmp_path: Path, name: str = "colour_tiny") -> list[dict]:
    """Return the complete rows of metrics.jsonl; the run may be writing the next one."""
    text = (tmp_path / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
