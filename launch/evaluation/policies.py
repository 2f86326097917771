"""The policies that --model and --against name: a checkpoint of a run, or a model by folder or hub name."""

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
from learner.checkpoints.checkpoint_folder import EXPORT, list_checkpoints
from shared.config.recipe import ConfigError, Recipe
from shared.vision import VisionSpec

EXPORT_LIMIT_S = 7200.0


@dataclass(frozen=True, slots=True)
class Named:
    """A policy named on the command line. `folder` is its model's folder; for a `checkpoint`, which holds only weights,
    the folder of the model with which the run began."""

    option: str
    given: str
    folder: str
    checkpoint: Path | None = None

    def export(self, out: Path, dtype: str) -> str:
        """Return the folder to load into engines. A checkpoint's weights are first exported to `out`, in `dtype`. Raise
        ValueError, in one line, for a checkpoint that is damaged or belongs to another model."""
        if self.checkpoint is None:
            return self.folder
        command = [sys.executable, "-P", "-m", "learner.export", str(self.checkpoint), "--out", str(out)]
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
    """Return the policy that `given` names. Raise ValueError, in one line, if it names none, or one that no engine can
    load."""
    path = Path(given)
    if (path / "meta.json").exists():
        policy = _checkpoint(option, given, recipe)
    elif (path / "checkpoints").is_dir():
        newest = next(iter(list_checkpoints(path / "checkpoints")[::-1]), path / "checkpoints" / "step_00000050")
        raise ConfigError(f"{option} {given} is the folder of a run: give one of its checkpoints, such as {newest}")
    elif not path.exists() and len(path.parts) > 1 and Path(path.parts[0]).exists():
        raise ConfigError(f"{option} {given}: there is no such folder; give a checkpoint's, a model's, or a hub name")
    else:
        policy = Named(option, given, local_model(given, option))
    try:
        _check_model(Path(policy.folder))
    except ValueError as error:
        raise ConfigError(f"{option} {given}: {error}") from error
    return policy


def _checkpoint(option: str, given: str, recipe: Recipe) -> Named:
    """Return a checkpoint's policy: its exported folder if there is one; else the checkpoint with the folder of its
    model, from its own recipe if that folder exists, else from the given recipe."""
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
    """Raise ValueError for a folder without a model of a family that engines load."""
    ModelFacts.load(str(folder), VisionSpec.load(folder))
    if not any(folder.glob("*.safetensors")):
        raise ValueError("no weights: the folder has no .safetensors file")
