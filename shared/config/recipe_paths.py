"""The paths in a recipe. A relative one is sought in the working folder, then beside the recipe; a model also in the
project. What is written (run.dir) goes into the working folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READ = (
    "path",
    "teacher",
    "module",
    "reward",
    "agent",
    "source",
    "eval_source",
    "rubric",
    "api_key_file",
    "keys",
    "sglang_env",
)
"""The last names of fields that may name a file or folder which a run reads."""
FREE = ("args", "columns", "variants", "env_config", "flags")
"""Fields of values by names of the user's: no paths are sought in them."""


def beside(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's values, as its file holds them, where each path that is not in the working folder, but in
    `folder`, is written so that it is found."""

    def found(name: str, value: Any) -> Any:
        if name in FREE:
            return value
        if isinstance(value, Mapping):
            return {inner: found(inner, each) for inner, each in value.items()}
        if isinstance(value, list):
            return [found(name, each) for each in value]
        if name == "command" and isinstance(value, str):
            return command_beside(value, folder)
        return path_beside(value, folder) if name in READ and isinstance(value, str) else value

    return {name: found(name, value) for name, value in values.items()}


def path_beside(text: str, folder: Path) -> str:
    """Return a path, or a function as `file.py:name`, as it is found from the working folder."""
    path, colon, name = text.partition(":") if ".py:" in text else (text, "", "")
    if not path or os.path.isabs(path) or path.startswith("~") or "\n" in path or is_there(Path(path)):
        return text
    return f"{folder / path}{colon}{name}" if is_there(folder / path) else text


def command_beside(command: str, folder: Path) -> str:
    """Return a command in which those words that name files beside the recipe are written so that they are found."""
    try:
        words = shlex.split(command)
    except ValueError:  # told where the recipe is checked
        return command
    found = [path_beside(word, folder) if os.path.isfile(folder / word) else word for word in words]
    return command if found == words else shlex.join(found)


def is_there(path: Path) -> bool:
    try:
        return any(path.parent.glob(path.name)) if has_magic(path.name) else path.exists()
    except (OSError, ValueError):  # a text that is no path, such as a rubric
        return False


def with_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with ~ written out in all texts that begin with ~/, and with a model that lies in the
    project, wherever the command is called."""

    def expanded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: expanded(inner) for name, inner in value.items()}
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value

    values = expanded(values)
    model = values["model"]["path"]
    if not Path(model).exists() and (ROOT / model / "config.json").is_file():
        values["model"]["path"] = str(ROOT / model)
    return values
