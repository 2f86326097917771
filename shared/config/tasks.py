"""The tasks of a run and their held-out sets: always tuples, of one task for a recipe without `[[tasks]]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shared.config.recipe import Recipe
from shared.config.sections import HeldOutConfig


@dataclass(frozen=True, slots=True)
class PlayedTask:
    """One task: its share of the groups, and the recipe of a run that has no other. The only task of a recipe without
    `[[tasks]]` has the name "", and its recipe is the run's."""

    name: str
    weight: float
    recipe: Recipe

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the task's name before the ValueErrors of the body."""
        try:
            yield
        except ValueError as error:
            if not self.name:
                raise
            raise ValueError(f"task {self.name!r}: {error}") from error


def tasks_of(recipe: Recipe) -> tuple[PlayedTask, ...]:
    """Return the tasks of a recipe, in its order."""
    if not recipe.tasks and not recipe.eval.sets:
        return (PlayedTask("", 1.0, recipe),)
    if not recipe.tasks:
        own = recipe.eval.model_copy(update={"sets": (), "samples": recipe.own_held_out("")})
        return (PlayedTask("", 1.0, recipe.model_copy(update={"eval": own})),)
    return tuple(PlayedTask(task.name, task.weight, recipe.alone(task)) for task in recipe.tasks)


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """One held-out set: `count` samples of a task. `source`: a dataset, "" for held-out seeds, whose samples get
    `env_config`."""

    name: str
    task: PlayedTask
    count: int
    source: str
    env_config: Mapping[str, Any]


def held_out_sets(recipe: Recipe) -> tuple[HeldOutSet, ...]:
    """Return the held-out sets of a recipe: those of `eval.sets`, else one for each task, of the task's name."""
    tasks = {task.name: task for task in tasks_of(recipe)}
    sets = recipe.eval.sets or [HeldOutConfig.model_construct(name=name, task=name) for name in tasks]
    found = []
    for each in sets:
        task, count = tasks[each.task], each.samples or recipe.eval.samples
        source = each.source or task.recipe.data.eval_source
        found.append(HeldOutSet(each.name, task, count, source, each.env_config))
    return tuple(found)
