"""Inputs for a recorder: a recipe, and the tickets of groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RecordConfig, RunConfig
from shared.types import Group, Sample, Sampling, Ticket
from tests.support.episodes import learner_config

SETTINGS = {"lr": 1e-3, "microbatch_tokens": 300}


@pytest.fixture
def recipe(folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(record: RecordConfig | None = None, **learner) -> Recipe:
        return Recipe(
            run=RunConfig(dir=str(tmp_path), name="run"),
            model=ModelConfig(path=str(folder), min_pixels=1024, max_pixels=1 << 20),
            env=EnvConfig(module="envs.colour"),
            learner=learner_config(**SETTINGS | learner),
            record=record or RecordConfig(every=1),
        )

    return make


def ticket_of(group: Group) -> Ticket:
    sample = Sample("sample-1", ({"role": "system", "content": "Play."},), label="4", metadata={"seed": 9})
    return Ticket(group.ticket_id, sample, len(group.trajectories), 0, Sampling(), 60.0, seed=17)


def folder_of(recipe: Recipe) -> Path:
    return Path(recipe.run.dir) / recipe.run.name / "recordings"
