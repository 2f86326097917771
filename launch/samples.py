"""From a recipe to samples: training and held-out, with the task's system prompt."""

from __future__ import annotations

from typing import Any

from envs.loader import load_env, load_module, system_prompt
from learner.samples import SampleSource, SeedSource
from shared.config import Recipe
from shared.types import Sample


def check_env(recipe: Recipe) -> None:
    """Loads the environment's module and builds one. ValueError, in one line, if either fails."""
    build_env = load_env(recipe.env.module)
    try:
        build_env(sample=Sample("check", metadata={"seed": 0}), args=recipe.env.args).close()
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises is the user's mistake
        words = f"{type(error).__name__}: {error}"
        raise ValueError(f"env.module = {recipe.env.module!r}: build_env failed with env.args: {words}") from error


def prompt(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """The messages before the first observation."""
    text = system_prompt(load_module(recipe.env.module), recipe.env.args)
    return ({"role": "system", "content": text},) if text else ()


def training_samples(recipe: Recipe) -> SampleSource:
    return SeedSource(recipe.data.first_seed, recipe.data.num_samples, prompt(recipe), split="train")


def held_out_samples(recipe: Recipe) -> list[Sample]:
    """Seeds never trained on, marked as held out, for environments that split by more than the seed."""
    source = SeedSource(recipe.data.eval_first_seed, max(1, recipe.eval.samples), prompt(recipe), split="heldout")
    return [source.sample(i) for i in range(recipe.eval.samples)]
