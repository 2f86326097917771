"""Makes the recipe of the doctor's trial: the same parts as a given recipe, but done in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.doctor_checks.locations import has_files
from launch.engines.kinds.engine_kind import engine_kind
from launch.engines.network import free_port
from launch.processes.children import ROOT
from launch.recipe_fields import set_fields
from launch.tiny_models.mixture import mixture_of
from shared.config.recipe import ConfigError, Recipe
from shared.config.tasks import tasks_of
from shared.engine.engine_kinds import DEFAULT_KIND, capabilities_of
from shared.families.model_sizes import ModelSizes

STAND_IN = "launch/models/colour_tiny"
LARGEST = 500e6  # parameters of the largest model that loads in seconds
EPISODES = 8
TURNS, TURN_TOKENS = 2, 32
MOST_RANKS = 2


@dataclass(frozen=True, slots=True)
class TrialRecipe:
    """The recipe of a trial. `changes` says, in words, how it differs from the user's recipe."""

    recipe: Recipe
    ranks: int
    changes: tuple[str, ...]


def make_trial_recipe(
    recipe: Recipe, run_dir: Path, model: Path | None, sizes: ModelSizes | None, num_gpus: int
) -> TrialRecipe:
    """Return a recipe of the same parts that runs in seconds. `model` is the folder of the recipe's model, None if it
    is not on this machine; `num_gpus` is the number of GPUs that torch sees. If the recipe has a mixture of experts
    that takes too long, a tiny mixture is written into `run_dir` and used instead."""
    changes: list[str] = []
    shares = recipe.engine.shares_gpu and num_gpus > 0
    recipe = recipe if shares else set_fields(recipe, {"engine.shares_gpu": False})
    own = model is not None and sizes is not None and sizes.parameters <= LARGEST and _has_data(recipe)
    fields: dict[str, Any] = {"run.dir": str(run_dir), "run.name": "trial", "eval.samples": 0, "pools": ()}
    if own:
        fields |= {"model.path": str(model), **_short(recipe)}
    else:
        fields |= _stand_in()
    devices = _devices(recipe, num_gpus, changes)
    fields |= _engine(recipe, devices["engine.device"], own, changes) | devices | _learner(recipe, changes)
    taken = recipe.engine.tensor_parallel if own and capabilities_of(fields["engine.kind"]).spans_gpus else 1
    on_gpus = devices["learner.device"] == "cuda"
    free = num_gpus - (taken if devices["engine.device"] == "cuda" else 0) if on_gpus else MOST_RANKS
    ranks = 1 if shares else max(1, min(MOST_RANKS, free))
    fields |= _mesh(recipe, ranks, changes)
    if not own:
        which = STAND_IN
        if fields["learner.parallel.expert"] > 1:
            fields["model.path"] = str(mixture_of(ROOT / STAND_IN, run_dir / "mixture"))
            which = f"a mixture of experts made of {STAND_IN}"
        changes.insert(0, f"{which} and its task instead of {recipe.model.path}, {_why(recipe, model, sizes)}")
    if devices["engine.device"] != recipe.engine.device:  # settings for GPUs do not hold on the CPU
        fields |= {"engine.mem_fraction": 0.0}
        fields |= {"engine.flags": {}, "engine.tensor_parallel": 1}
    if devices["learner.device"] != recipe.learner.device:
        fields |= {"learner.parallel.attention": "auto", "learner.parallel.offload": False}
    return TrialRecipe(set_fields(recipe, fields), ranks, tuple(changes))


def _has_data(recipe: Recipe) -> bool:
    return all(has_files(path) for task in tasks_of(recipe) for path in task.recipe.data.paths)


def _why(recipe: Recipe, model: Path | None, sizes: ModelSizes | None) -> str:
    if model is None:
        return "which is not on this machine"
    if sizes is None:
        return "whose size is not known"
    return "whose data is not there" if sizes.parameters <= LARGEST else "which takes long to load"


def _short(recipe: Recipe) -> dict[str, Any]:
    env = recipe.env
    tokens = min(env.turn_tokens, TURN_TOKENS)
    turns = min(env.max_turns, TURNS)
    fields: dict[str, Any] = {"max_turns": turns, "turn_tokens": tokens}
    fields["max_tokens"] = min(env.max_tokens, turns * tokens)
    if not recipe.tasks:
        return {f"env.{name}": value for name, value in fields.items()}
    tasks = []
    for task, alone in zip(recipe.tasks, tasks_of(recipe), strict=True):
        tasks.append(task.model_dump() | {n.removeprefix("env."): v for n, v in _short(alone.recipe).items()})
        tasks[-1]["group_size"] = 0
    return {"tasks": tasks, "eval.sets": ()}


def _stand_in() -> dict[str, Any]:
    """Return the fields that replace model and task by the colour task; dtype, engine, objective, optimizer and
    parallelism stay the recipe's."""
    env: dict[str, Any] = {"module": "envs.colour", "args": {}, "reward": "", "isolation": "thread"}
    env |= {"max_turns": 1, "max_tokens": 4, "turn_tokens": 4}
    data: dict[str, Any] = {"source": "seeds", "weights": (), "eval_source": "", "variants": []}
    fields: dict[str, Any] = {"tasks": (), "eval.sets": ()}
    fields |= {f"env.{name}": value for name, value in env.items()} | {f"data.{name}": v for name, v in data.items()}
    fields |= {
        "reward.url": "",
        "reward.send": (),
        "reward.judge": {},
        "reward.isolation": "thread",
        "rollout.path": "",
        "rollout.agent": "",
        "rollout.command": "",
        "rollout.listen": "",
        "rollout.api_key_file": "",
    }
    fields |= {"model.path": str(ROOT / STAND_IN), "model.max_context": 128}
    return fields | {"model.min_pixels": 1024, "model.max_pixels": 1048576}


def _devices(recipe: Recipe, num_gpus: int, changes: list[str]) -> dict[str, str]:
    """Return the devices of learner and engine."""
    learner, engine = recipe.learner.device, recipe.engine.device
    if num_gpus == 0 and "cuda" in (learner, engine):
        changes.append("on the CPU: torch sees no GPU")
        return {"learner.device": "cpu", "engine.device": "cpu"}
    if learner == engine == "cuda" and num_gpus == 1 and not recipe.engine.shares_gpu:
        changes.append("the engine on the CPU: NCCL joins no two ranks on one GPU")
        engine = "cpu"
    return {"learner.device": learner, "engine.device": engine}


def _engine(recipe: Recipe, device: str, own: bool, changes: list[str]) -> dict[str, Any]:
    """Return the fields of one engine, on a free port of loopback."""
    fields: dict[str, Any] = {"engine.urls": (), "engine.router": "", "engine.count": 1, "engine.gpus": ()}
    fields |= {"engine.host": "127.0.0.1", "engine.port": free_port(), "engine.kind": recipe.engine.kind}
    if not own:
        fields["engine.tensor_parallel"] = 1
    try:
        engine_kind(recipe.engine.kind).check(set_fields(recipe, {"engine.device": device}))
    except ConfigError as error:
        changes.append(f"the {DEFAULT_KIND} engine: {str(error).partition('; ')[0]}")
        fields["engine.kind"] = DEFAULT_KIND
    return fields


def _learner(recipe: Recipe, changes: list[str]) -> dict[str, Any]:
    """Return the fields of one short step."""
    learner = recipe.learner
    group = min(learner.group_size, EPISODES)
    fields: dict[str, Any] = {"group_size": group, "groups_per_step": EPISODES // group, "total_steps": 1}
    fields |= {"max_staleness": 1, "resume": "never"}
    fields |= {"objective.minibatches": min(learner.objective.minibatches, EPISODES // group * group)}
    fields |= {"objective.overlong_tokens": 0, "objective.overlong_buffer": 0}
    fields |= {"publish.verify_every": 1, "checkpoint.in_background": False}
    if learner.objective.overlong == "penalise":
        fields["objective.overlong"] = "train"
    if learner.parallel.compile:
        changes.append("without learner.parallel.compile, which takes minutes")
        fields["parallel.compile"] = False
    return {"actor.processes": 1, "actor.groups": 1} | {f"learner.{name}": value for name, value in fields.items()}


def _mesh(recipe: Recipe, ranks: int, changes: list[str]) -> dict[str, Any]:
    """Return the fields of the mesh: for each, the largest common divisor of the recipe's value and the number of ranks
    (all that the recipe's value divides is divided by it, too). The shared computation is checked when the model is
    loaded."""
    fields: dict[str, Any] = {"learner.parallel.shard_size": 0, "learner.parallel.check": True}
    for name in ("context", "expert"):
        wanted = getattr(recipe.learner.parallel, name)
        fields[f"learner.parallel.{name}"] = size = math.gcd(wanted, ranks)
        if size != wanted:
            on = f"{ranks} rank{'s' * (ranks > 1)}"
            changes.append(f"learner.parallel.{name} = {size} on {on} instead of {wanted}")
    return fields
