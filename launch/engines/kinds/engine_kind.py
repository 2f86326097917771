"""The interface of a kind of inference engine: how and where one is started, and checks before the start.

A kind is a module with `ENGINE`, an instance of `EngineKind`. Names are in `shared.engine.engine_kinds`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from launch.findings import Finding, ok
from launch.processes.children import cpu_env
from shared.config.recipe import ConfigError, Recipe
from shared.engine import nccl_variables
from shared.engine.engine_kinds import module_of
from shared.engine.engine_messages import UNTRAINED


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How one engine is started. `log`: the file its output goes to; None = this process's own stderr."""

    name: str
    url: str
    command: tuple[str, ...]
    env: dict[str, str]
    gpus: tuple[str, ...] = ()  # the machine's names of its GPUs
    log: Path | None = None
    # A file that the engine reads, and its content; only its owner can read it.
    secret: tuple[Path, str] | None = field(default=None, repr=False)
    shares_gpu: bool = False  # it shares its GPU with the learner


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """An engine's number on its host, its port, and the machine's names of its GPUs (none on a CPU). `weight_version`:
    the name of the weights that it loads.
    """

    index: int
    port: int
    gpus: tuple[str, ...] = ()
    weight_version: str = UNTRAINED

    @property
    def name(self) -> str:
        return f"engine on port {self.port}"


class EngineKind(ABC):
    """One kind of engine: a server that answers the protocol of `shared.engine.engine_api`."""

    setup_command = ""
    """What a host has to run once, beside `make env`, before it can start one."""

    @abstractmethod
    def spec(self, recipe: Recipe, placement: EnginePlacement) -> EngineSpec:
        """Return how an engine of the recipe is started. Raise ConfigError for settings that this kind does not
        support."""

    def environment(self, recipe: Recipe) -> Path | None:
        """Return the folder of the server's Python environment; None if it is this process's own."""
        return None

    def check(self, recipe: Recipe) -> None:  # noqa: B027 - most kinds need nothing
        """Raise ConfigError, with the cure after a semicolon, if this host lacks something that the server needs.
        Starts nothing."""

    def examine(self, recipe: Recipe) -> Finding:
        """Return the doctor's finding about the server's software."""
        return ok("engine software", f"{recipe.engine.kind}: in this environment")


def engine_kind(name: str) -> EngineKind:
    """Return the kind that a recipe calls `name`. Raise ConfigError if there is none, or if its module has no
    ENGINE."""
    try:
        module = module_of(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    engine = getattr(module, "ENGINE", None)
    if not isinstance(engine, EngineKind):
        raise ConfigError(f"engine.kind = {name!r}: the module has no ENGINE; give it an instance of an EngineKind")
    return engine


def engine_env(recipe: Recipe, gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables that engines of every kind are started with."""
    return cpu_env(recipe.engine.threads) | gpu_env(gpus)


def gpu_env(gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables of a process that computes on these GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **nccl_variables.settings(os.environ)} if gpus else {}
