"""Commands on the small colour task, with a folder and ports of the test's own, and what such a run wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.machine import free_port

RECIPE = "launch/recipes/colour_tiny.toml"


def places(tmp_path: Path, **more: object) -> list[str]:
    """Overrides that keep two runs on one machine apart."""
    address = f"tcp://127.0.0.1:{free_port()}"
    fields = {"run.dir": tmp_path, "learner.bind": address, "actor.learner": address, "engine.port": free_port()}
    return [part for key, value in {**fields, **more}.items() for part in (f"--{key}", str(value))]


def local(arguments: list[str]) -> list[str]:
    return [sys.executable, "launch/local.py", "--config", RECIPE, *arguments]


def metrics(tmp_path: Path) -> list[dict]:
    lines = (tmp_path / "colour_tiny" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
