"""Commands on small recipes, the colour task's if none is named, in a folder and on ports of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

from launch.engines.network import free_port

RECIPE = "launch/recipes/colour_tiny.toml"

LEARNING_S = 800.0  # a whole training of a small model, on a slow machine


def places(tmp_path: Path, **more: object) -> list[str]:
    """Overrides that keep two runs on one machine apart."""
    address = f"tcp://127.0.0.1:{free_port()}"
    fields = {"run.dir": tmp_path, "learner.bind": address, "actor.learner": address, "engine.port": free_port()}
    return [part for key, value in {**fields, **more}.items() for part in (f"--{key}", str(value))]


def command(script: str, arguments: list[str], recipe: str = RECIPE) -> list[str]:
    return [sys.executable, f"launch/{script}.py", "--config", recipe, *arguments]


def local(arguments: list[str]) -> list[str]:
    return command("local", arguments)


def finished(arguments: list[str], timeout_s: float = 250) -> subprocess.CompletedProcess[str]:
    """The command, which has ended well."""
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


def refused(arguments: list[str], codes: Container[int] = (2,)) -> tuple[str, str]:
    """The one line in which a command named the user's mistake, and all of its stderr."""
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=250)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")] or [ended.stderr[-3000:]]
    assert ended.returncode in codes, line
    assert "Traceback" not in ended.stderr
    return line, ended.stderr


def metrics(tmp_path: Path, name: str = "colour_tiny") -> list[dict]:
    """The whole rows; the run may be writing the next."""
    text = (tmp_path / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
