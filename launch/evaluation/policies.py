"""What --model and --against name: a checkpoint of a run, or a model's folder or hub name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actor.isolation.lifeline import tied_to_this_process
from launch.engines.probe import ModelFacts
from launch.hub import local_model
from launch.processes.children import module_path
from learner.checkpoints.folder import EXPORT, list_checkpoints
from shared.config import ConfigError, Recipe
from shared.vision import VisionSpec

EXPORT_LIMIT_S = 7200.0


@dataclass(frozen=True, slots=True)
class Named:
    """A policy as the command line has it. `folder`: of its model; where `checkpoint` is one, the model's that the run
    began with, as the checkpoint has weights alone."""

    option: str
    given: str
    folder: str
    checkpoint: Path | None = None

    def export(self, out: Path, dtype: str) -> str:
        """The folder that engines load: a checkpoint's weights are written to `out` first, in `dtype`. ValueError, in
        one line, for a damaged checkpoint or one of another model."""
        if self.checkpoint is None:
            return self.folder
        command = [sys.executable, "-m", "learner.export", str(self.checkpoint), "--out", str(out)]
        command += ["--model", self.folder, "--dtype", dtype]
        env = {**os.environ, "PYTHONPATH": module_path()}
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=env,
                timeout=EXPORT_LIMIT_S,
                preexec_fn=tied_to_this_process(),
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.given} is not exported within {EXPORT_LIMIT_S:g} s") from None
        if ended.returncode:
            lines = [line for line in ended.stderr.splitlines() if line.strip()] or ["it says nothing"]
            raise ValueError(f"{self.option} {self.given}: {lines[-1].removeprefix('error: ')}")
        return str(out)


def named(option: str, given: str, recipe: Recipe) -> Named:
    """What `given` leads to, looked at. ValueError, in one line, for what is neither, or that no engine could load."""
    path = Path(given)
    if (path / "meta.json").exists():
        found = _checkpoint(option, given, recipe)
    elif (path / "checkpoints").is_dir():
        newest = next(iter(list_checkpoints(path / "checkpoints")[::-1]), path / "checkpoints" / "step_00000050")
        raise ConfigError(f"{option} {given} is the folder of a run: give one of its checkpoints, such as {newest}")
    elif not path.exists() and len(path.parts) > 1 and Path(path.parts[0]).exists():
        raise ConfigError(f"{option} {given}: there is no such folder; give a checkpoint's, a model's, or a hub name")
    else:
        found = Named(option, given, local_model(given, option))
    try:
        _check_model(Path(found.folder))
    except ValueError as error:
        raise ConfigError(f"{option} {given}: {error}") from error
    return found


def _checkpoint(option: str, given: str, recipe: Recipe) -> Named:
    """With the folder that it was exported to, if it was; else with its model's, where the run had it or as the recipe
    says."""
    path = Path(given)
    if (path / EXPORT / "config.json").exists():
        return Named(option, given, str(path / EXPORT))
    try:
        meta: Any = json.loads((path / "meta.json").read_text())
        model = str(meta["recipe"]["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{option} {given}: its meta.json is no description of a checkpoint: {error}") from error
    model = model if (Path(model) / "config.json").exists() else local_model(recipe.model.path)
    return Named(option, given, model, path)


def _check_model(folder: Path) -> None:
    """ValueError for a folder without a vision-language model of a family that engines load."""
    ModelFacts.load(str(folder), VisionSpec.load(folder))
    if not any(folder.glob("*.safetensors")):
        raise ValueError("no weights: the folder has no .safetensors file")
