"""The engines of this host: how each is started, and checks before anything heavy starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launch.engines.gpus import check_apart, check_shared, engine_gpus, gpu_names, num_visible
from launch.engines.kinds.engine_kind import EnginePlacement, EngineSpec, engine_kind
from launch.engines.network import check_ports, check_reach
from shared.config.recipe import ConfigError, Recipe
from shared.engine.engine_messages import UNTRAINED
from shared.engine.nccl_versions import environment_in, unequal_nccl


def engine_specs(recipe: Recipe, weight_version: str = UNTRAINED) -> tuple[EngineSpec, ...]:
    """Return how each engine of the recipe is started; `weight_version` is the name of the weights that it loads. Raise
    ConfigError for missing GPUs or an environment that is not built."""
    engine, kind = recipe.engine, engine_kind(recipe.engine.kind)
    gpus = engine_gpus(engine, num_visible() if engine.device == "cuda" else 0)
    placements = (
        EnginePlacement(index, engine.port + index, gpu_names(indices, os.environ), weight_version)
        for index, indices in enumerate(gpus)
    )
    return tuple(kind.spec(recipe, placement) for placement in placements)


def check_host(recipe: Recipe, num_ranks: int = 0, weight_version: str = UNTRAINED) -> tuple[EngineSpec, ...]:
    """Return the engines to start. Raise ConfigError if they cannot be started beside `num_ranks` learner ranks on this
    host, or if there are not enough GPUs for the ranks."""
    if recipe.engine.elsewhere:
        return ()
    check_reach(recipe)
    if recipe.engine.shares_gpu:
        check_shared(recipe.engine, recipe.learner.device, num_ranks)
    if num_ranks and recipe.learner.device == "cuda" and (visible := num_visible()) < num_ranks:
        raise ConfigError(
            f"learner.device = 'cuda' with {num_ranks} ranks: torch sees {visible} GPUs here; start fewer ranks, or "
            "set learner.device to 'cpu'"
        )
    specs = engine_specs(recipe, weight_version)
    check_ports(recipe)
    if not recipe.engine.shares_gpu and recipe.engine.device == recipe.learner.device == "cuda":
        check_apart(engine_gpus(recipe.engine, num_visible()), num_ranks)
        if num_ranks:
            check_nccl(recipe)
    return specs


def check_alone(recipe: Recipe) -> None:
    """Raise ConfigError unless this host has engines and actors that play: the command uses this host alone."""
    engines = recipe.engine.count or recipe.engine.urls
    if not engines or not recipe.actor.groups:
        field = "actor.groups" if engines else "engine.count"
        raise ConfigError(f"{field} = 0 is for one host of several, and this command has one; set it to 1 or more")


def check_nccl(recipe: Recipe) -> None:
    """Raise ConfigError if the engines' environment has another NCCL version than this one, in which the learner will
    run."""
    folder = engine_kind(recipe.engine.kind).environment(recipe)
    if folder is None:
        return
    learner = environment_in(Path(sys.prefix))
    if problem := unequal_nccl(learner.nccl, environment_in(folder).nccl):
        raise ConfigError(f"engine.sglang_env = {recipe.engine.sglang_env!r}: {problem}")
