"""What a user asks for on the command line, resolved: recipe, model, data. Nothing is fetched, nothing is started."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.diagnosis.miniature import with_values
from launch.task_run.commands import as_options, changed
from launch.task_run.machines import KINDS
from launch.task_run.places import Data, check_data, data_of, model_place
from launch.task_run.tasks import MODELS, given_fields, hub_name, recipe_of, sizes_of_model
from learner.model.sizes import ModelSizes
from shared.config import ConfigError, Recipe, load_recipe

SOKOBAN = "envs.sokoban"


@dataclass(frozen=True, slots=True)
class Request:
    """`config` with `options` is `recipe`; `given` are the dotted fields that the user has set."""

    task: str
    config: str
    options: tuple[str, ...]
    recipe: Recipe
    given: frozenset[str]
    model: str  # as the hub names it, or a folder
    sizes: ModelSizes
    data: Data
    notes: tuple[str, ...]

    @property
    def on_cpu(self) -> bool:
        return self.recipe.learner.device == "cpu"

    def with_fields(self, fields: dict[str, Any]) -> Request:
        """With further fields set; what the user has set stays. ConfigError."""
        options = (*as_options(fields), *self.options)
        return replace(self, options=options, recipe=with_values(self.recipe, fields))


def request(options: argparse.Namespace, overrides: Sequence[str]) -> Request:
    """ConfigError, in one line, for an unknown name or field, for options that contradict each other, and for a dataset
    that is here and lacks a column."""
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
    check_data(data, recipe.env.module == SOKOBAN)
    fields = {"model.path": model_place(name, options.folder)}
    fields |= {"data.source": data.source, "data.eval_source": data.heldout}
    if (
        name != tomllib.loads(Path(config).read_text(encoding="utf-8"))["model"]["path"]
    ):  # a folder of its own: another model resumes no run of this one
        fields["run.name"] = f"{recipe.run.name}_{name.rstrip('/').rpartition('/')[2]}"
    fields = changed(recipe, fields, given)
    made, resolved = (*as_options(fields), *overrides), with_values(recipe, fields)
    notes = tuple(_notes(options.task, config, name, resolved))
    return Request(options.task, config, made, resolved, given, name, sizes, data, notes)


def _check_assumed(options: argparse.Namespace) -> None:
    if options.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node {options.gpus_per_node}: at least 1")
    for name in ("gpu_memory", "host_memory", "episode_tokens"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name):g}: at least 0")


def _check_cpu(options: argparse.Namespace, model: str) -> None:
    if options.gpus:
        raise ConfigError(f"--gpus {options.gpus}: {options.task} computes on the CPU; leave --gpus out")
    if model and not Path(model).exists():
        raise ConfigError(f"--model {model}: {options.task} computes on the CPU; give the folder of a small model")


def _notes(task: str, config: str, model: str, recipe: Recipe) -> Iterator[str]:
    if not model.endswith("Thinking"):
        return
    if Path(config).stem != task:
        yield f"a Thinking model: {config}, which leaves room for its thoughts"
    elif not task.endswith("thinking"):
        yield f"a Thinking model's thoughts count in env.turn_tokens = {recipe.env.turn_tokens}: it may need more"


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any field of the recipe can be overridden: --learner.optimizer.lr 2e-6 --env.max_turns 4",
        allow_abbrev=False,
    )
    made.add_argument("task", help="a recipe of launch/recipes, without its ending")
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
    assumed.add_argument("--gpu", choices=KINDS, default="", help="kind of GPU; left out: this machine's, or an h100")
    assumed.add_argument("--gpu-memory", type=float, default=0, help="of one GPU, in GB; left out: the kind's")
    assumed.add_argument("--host-memory", type=float, default=0, help="of one host, in GB; left out: the kind's")
    assumed.add_argument("--gpus-per-node", type=int, default=8, help="of one host; 8")
    assumed.add_argument("--episode-tokens", type=int, default=0, help="of a mean episode; half of model.max_context")
    return made
