"""Writing checkpoints of a small trainer into the test's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.checkpoints.saver import Saver
from shared.config.learner_section import LearnerConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from tests.support.episodes import learner_config


def config(**changes: Any) -> LearnerConfig:
    settings = {"lr": 1e-3, "value_lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "total_steps": 10}
    return learner_config(**settings | changes)


def recipe(**changes: Any) -> Recipe:
    return Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="envs.colour"), learner=config(**changes))


def save(trainer: Any, ranks: Any, path: Path, *, version: int = 7, keep: int = 2, background: bool = False) -> Path:
    settings = recipe(keep=keep, in_background=background)
    saver = Saver(path, trainer, ranks, settings)
    where = saver.save(version, {"cursor": version, "open": ["a"]})
    saver.wait()
    saver.close()
    return where
