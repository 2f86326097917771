"""What a user names: a task, a model, fields of the recipe. Each unknown name is one line with the known ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.diagnosis.places import model_folder, sizes_in
from launch.processes.children import ROOT
from learner.model.sizes import PUBLISHED, ModelSizes, find
from shared.config import ConfigError, Recipe, known_fields

RECIPES = ROOT / "launch" / "recipes"
KINDS = ("Instruct", "Thinking")
MODELS = [f"{base}-{kind}" for base in PUBLISHED for kind in KINDS if kind == "Instruct" or base.startswith("Qwen3")]


def tasks() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def recipe_of(task: str, model: str = "") -> Path:
    """The task's recipe; of a Thinking model the twin with room for its thoughts, where there is one. ConfigError."""
    if task not in tasks():
        raise ConfigError(f"unknown task {task!r}: the tasks are {', '.join(tasks())}")
    twin = f"{task}_thinking"
    path = RECIPES / f"{twin if model.endswith('Thinking') and twin in tasks() else task}.toml"
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def hub_name(model: str) -> str:
    """The hub's name of a model that is named as its family names it; anything else as it is."""
    return f"Qwen/{model}" if model in MODELS else model


def sizes_of_model(path: str) -> ModelSizes:
    """Of a folder, of a model that was downloaded, or of a published one that was not. ConfigError with the list."""
    folder = model_folder(path)
    sizes = sizes_in(folder)
    if sizes is not None:
        return sizes
    try:
        return find(str(folder) if folder is not None else path)
    except ValueError as error:
        if folder is not None and (folder / "config.json").exists():
            raise ConfigError(str(error)) from None
    raise ConfigError(f"unknown model {path!r}: give the folder of a Qwen-VL model, or one of {', '.join(MODELS)}")


def given_fields(overrides: Sequence[str]) -> set[str]:
    """The dotted fields that the command line or the environment sets."""
    fields = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}
    named = [name.removeprefix("PRONK_") for name in os.environ if name.startswith("PRONK_")]
    fields |= {name.lower().replace("__", ".") for name in named}
    return fields & known_fields().keys()


def value_of(recipe: Recipe, field: str) -> Any:
    """Of a dotted field."""
    value: Any = recipe
    for name in field.split("."):
        value = getattr(value, name)
    return value
