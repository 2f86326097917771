"""Resolves the user's command line to recipe, model and data, without downloading or starting anything."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.catalog import MODELS, hub_name, recipe_of, sizes_of_model, tasks
from launch.recipe_fields import as_options, changed_fields, given_fields, set_fields, without_field
from launch.task_run.downloads import Data, check_data, data_of, model_place
from learner.plan.machines import GPU_KINDS
from shared.config.recipe import ConfigError, Recipe, load_recipe
from shared.families.model_sizes import ModelSizes

SOKOBAN = "envs.sokoban"


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A resolved request. `recipe` is the file `config` with `options`; `given` are the dotted fields that the user has
    set."""

    task: str
    config: str
    options: tuple[str, ...]
    recipe: Recipe
    given: frozenset[str]
    model: str  # hub name or folder
    sizes: ModelSizes
    data: Data
    notes: tuple[str, ...]

    @property
    def on_cpu(self) -> bool:
        return self.recipe.learner.device == "cpu"

    def with_fields(self, fields: dict[str, Any]) -> RunRequest:
        """Return the request with further fields set; the user's own settings stay. Raise ConfigError if they
        contradict others."""
        options = (*as_options(fields), *self.options)
        return replace(self, options=options, recipe=set_fields(self.recipe, fields))


def resolve(options: argparse.Namespace, overrides: Sequence[str]) -> RunRequest:
    """Return the request for the command line. Raise ConfigError, in one line, for an unknown name or field, for
    options that contradict each other, and for an existing dataset that lacks a column."""
    _check_assumed(options)
    given, name = frozenset(given_fields(overrides)), hub_name(options.model)
    config = str(recipe_of(options.task, options.model))
    recipe = load_recipe(config, list(overrides))
    if name and "model.path" in given:
        raise ConfigError(f"--model {options.model} and model.path = {recipe.model.path!r}: leave one of them out")
    if recipe.learner.device == "cpu":
        _check_cpu(options, name)
    name = name or hub_name(recipe.model.path)
    sizes = sizes_of_model(name)
    data = data_of(recipe, options.dataset, options.folder, given="data.source" in given)
    check_data(data, recipe.env.module == SOKOBAN, recipe.data.columns)
    fields: dict[str, Any] = {"model.path": model_place(name, options.folder)}
    fields |= {"data.source": data.source, "data.eval_source": data.heldout}
    if data.columns:  # the user's are those of the raw file
        fields["data.columns"], given = data.made_columns, given - {"data.columns"}
        overrides = without_field(overrides, "data.columns")
    recipes_model = tomllib.loads(Path(config).read_text(encoding="utf-8"))["model"]["path"]
    if name != recipes_model and (options.model or "model.path" in given):
        # another folder, so that a run with another model is not resumed
        fields["run.name"] = f"{recipe.run.name}_{name.rstrip('/').rpartition('/')[2]}"
    fields = changed_fields(recipe, fields, given)
    resolved = set_fields(recipe, fields)
    notes = tuple(_notes(options.task, config, name, resolved))
    words = (*as_options(fields), *overrides)
    return RunRequest(options.task, config, words, resolved, given, name, sizes, data, notes)


def _check_assumed(options: argparse.Namespace) -> None:
    """Raise ConfigError for impossible numbers in the options that describe machines and episodes."""
    if options.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node {options.gpus_per_node}: at least 1")
    for name in ("gpu_memory", "host_memory", "episode_tokens"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name):g}: at least 0")


def _check_cpu(options: argparse.Namespace, model: str) -> None:
    """Raise ConfigError for options that do not fit a task on the CPU."""
    if options.gpus:
        cure = "" if options.task in tasks() else ', or set learner.device = "cuda", and engine.kind = "sglang"'
        raise ConfigError(f"--gpus {options.gpus}: {options.task} computes on the CPU; leave --gpus out{cure}")
    if model and not Path(model).exists():
        raise ConfigError(f"--model {model}: {options.task} computes on the CPU; give the folder of a small model")


def _notes(task: str, config: str, model: str, recipe: Recipe) -> Iterator[str]:
    """Yield notes for the user about a Thinking model."""
    if not model.endswith("Thinking"):
        return
    if Path(config).stem != task:
        yield f"a Thinking model: {config}, which leaves room for its thoughts"
    elif not task.endswith("thinking"):
        yield f"a Thinking model's thoughts count in env.turn_tokens = {recipe.most_turn_tokens}: it may need more"


def run_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the command's own options; all other options are recipe fields."""
    made = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any field of the recipe can be overridden: --learner.optimizer.lr 2e-6 --env.max_turns 4",
        allow_abbrev=False,
    )
    made.add_argument("task", help="the name of a recipe in launch/recipes, or the path of one's own")
    made.add_argument("--model", default="", help=f"a folder, or {', '.join(MODELS)}; left out: the recipe's")
    made.add_argument("--gpus", type=int, default=0, help="learner and engines together; left out: all of this machine")
    made.add_argument(
        "--dataset", default="", help="a .parquet or .jsonl file, or a hub name; left out: the task's own"
    )
    made.add_argument("--folder", default="", help="where data and model are put; left out: data/, and the hub's cache")
    made.add_argument("--dry-run", action="store_true", help="only the plan and the commands; no network, no GPU")
    made.add_argument("--price", type=float, help="dollars an hour and GPU")
    made.add_argument("--save", default="", metavar="FILE", help="write the resolved recipe")
    made.add_argument("--json", action="store_true", help="the plan as one JSON object on one line")
    assumed = made.add_argument_group("what is assumed of machines that are not here, and of episodes")
    assumed.add_argument(
        "--gpu", choices=GPU_KINDS, default="", help="kind of GPU; left out: this machine's, or an h100"
    )
    assumed.add_argument("--gpu-memory", type=float, default=0, help="of one GPU, in GB; left out: the kind's")
    assumed.add_argument("--host-memory", type=float, default=0, help="of one host, in GB; left out: the kind's")
    assumed.add_argument("--gpus-per-node", type=int, default=8, help="of one host; 8")
    assumed.add_argument("--episode-tokens", type=int, default=0, help="of a mean episode; half of model.max_context")
    return made
