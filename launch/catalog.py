"""Looks up the tasks and models that a user names. An unknown name gives an error of one line with the known names."""

from __future__ import annotations

import difflib
import json
from contextlib import suppress
from pathlib import Path

from launch.processes.children import ROOT
from shared.config.recipe import ConfigError, recipe_path
from shared.families.model_sizes import ModelSizes
from shared.families.registry import FAMILIES, HUB_NAMES, PUBLISHED, find_sizes, sizes_of

RECIPES = ROOT / "launch" / "recipes"
MODELS = list(HUB_NAMES)


def tasks() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def recipe_of(task: str, model: str = "") -> Path:
    """Return the path of a task's recipe, or of the user's own, given by its path; for a Thinking model the variant
    TASK_thinking, which leaves room for thoughts, if there is one. Raise ConfigError for an unknown task."""
    if task not in tasks():
        path = Path(recipe_path(task))
        if path.stem not in tasks() or path.parent.resolve() != RECIPES:
            return path
        task = path.stem
    twin = f"{task}_thinking"
    path = RECIPES / f"{twin if model.endswith('Thinking') and twin in tasks() else task}.toml"
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def hub_name(model: str) -> str:
    """Return the hub's full name of a published model, however its name is written: with or without the organisation
    and the variant (Instruct if left out), in any case. Any other text is returned unchanged."""
    if Path(model).exists():
        return model
    organisation, _, name = model.rpartition("/")
    spellings = {short.lower(): full for short, full in HUB_NAMES.items()}
    full = next((spellings[each] for each in (name.lower(), f"{name}-instruct".lower()) if each in spellings), "")
    return full if full and organisation.lower() in ("", full.partition("/")[0].lower()) else model


def model_folder(path: str) -> Path | None:
    """Return a model's folder on this machine; None if it is not here."""
    if Path(path).exists():
        return Path(path)
    import huggingface_hub

    try:
        path_in_cache = huggingface_hub.try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a hub name either
        return None
    return Path(path_in_cache).parent if isinstance(path_in_cache, str) else None


def sizes_in(folder: Path | None) -> ModelSizes | None:
    """Return the sizes of the model in a folder; None if they are not known."""
    if folder is None or not (folder / "config.json").exists():
        return None
    with suppress(ValueError, KeyError):
        return sizes_of(json.loads((folder / "config.json").read_text()))
    return None


def sizes_of_model(path: str) -> ModelSizes:
    """Return the sizes of a model given by its folder or hub name; a published model need not be downloaded. Raise
    ConfigError, which lists the published models, for an unknown one."""
    folder = model_folder(path)
    sizes = sizes_in(folder)
    if sizes is not None:
        return sizes
    try:
        return find_sizes(str(folder) if folder is not None else path)
    except ValueError as error:
        if folder is not None and (folder / "config.json").exists():
            raise ConfigError(str(error)) from None
    near = difflib.get_close_matches(path.rpartition("/")[2], sorted({*PUBLISHED, *MODELS}), n=3, cutoff=0.7)
    families = ", ".join(family.title for family in FAMILIES.values())
    cure = f"did you mean {' or '.join(near)}?" if near else f"the published models that run are of {families}"
    raise ConfigError(f"unknown model {path!r}: it is no folder here; {cure}")
