"""From a recipe to samples: training and held-out, with the task's system prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envs.datasets import load_dataset
from envs.loader import check_settings, load_env, load_function, load_module, raised, system_prompt
from launch.hub import with_local_model
from learner.tickets.sources import ListSource, SampleSource, SeedSource
from shared.config import ConfigError, Recipe
from shared.frames import Limits
from shared.log import get_logger
from shared.types import Sample
from shared.vision import VisionSpec


def ready(recipe: Recipe) -> Recipe:
    """The recipe with its model on this machine. ValueError, in one line, for an environment, a function or a model
    that cannot be used: all that can be known to be wrong before anything heavy starts."""
    check_env(recipe)
    recipe = with_local_model(recipe)
    VisionSpec.load(recipe.model.path)
    return recipe


def check_env(recipe: Recipe) -> None:
    """Loads the environment's module and builds one, and one of each variant; loads the recipe's functions. ValueError
    if that fails, or for a setting that the module does not know."""
    load_env(recipe.env.module)
    for field, function, kind in (
        ("env.reward", recipe.env.reward, "a function that takes what was played and returns its reward"),
        ("rollout.path", recipe.rollout.path, "an async function that plays an episode"),
    ):
        if function:
            check_function(field, function, kind)
    if recipe.reward.url and not recipe.reward.url.startswith(("http://", "https://")):
        raise ConfigError(f"reward.url = {recipe.reward.url!r}: write it as http://host:port/path")
    if "max_turns" in recipe.env.args:
        raise ConfigError(f"env.args has max_turns = {recipe.env.args['max_turns']!r}: set env.max_turns")
    check_build(recipe, "env.args", {})
    for variant in recipe.data.variants:
        check_build(recipe, f"data.variants = {variant}", variant)


def check_function(field: str, path: str, kind: str) -> None:
    """ValueError, naming the field and the `kind` of function that it wants, if there is none at `path`."""
    try:
        load_function(path)
    except ValueError as error:
        raise ValueError(f"{field} = {path!r} is to be {kind}: {error}") from error


def check_build(recipe: Recipe, place: str, variant: dict[str, Any]) -> None:
    """ValueError, naming `place`, if the environment cannot be built with `variant` over `env.args`."""
    if not recipe.rollout.path:  # which may have settings of its own
        check_settings(load_module(recipe.env.module), {**recipe.env.build_args, **variant}, place)
    sample = Sample("check", metadata={"seed": 0} | ({"env_config": variant} if variant else {}))
    try:
        load_env(recipe.env.module)(sample=sample, args=recipe.env.build_args).close()
    except Exception as error:
        where = f"env.module = {recipe.env.module!r}"
        raise ValueError(f"{where}: build_env failed with {place}: {raised(error)}") from error


def prompt(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """The messages before the first observation."""
    text = system_prompt(load_module(recipe.env.module), recipe.env.build_args)
    return ({"role": "system", "content": text},) if text else ()


def check_data(recipe: Recipe) -> None:
    """ValueError for files of which no sample can be read, or whose first one the environment cannot be built with; and
    for a held-out file that nobody would read."""
    data = recipe.data
    if data.source == "seeds":
        if data.eval_source:
            raise ConfigError(
                f"data.eval_source = {data.eval_source!r}, but data.source = 'seeds', whose held-out samples are seeds "
                "too: leave it out, or name a file as data.source"
            )
        return
    for path in (data.source, *([data.eval_source] if recipe.eval.samples else [])):
        sample = rows(recipe, path, most=1)[0]
        if not recipe.rollout.path:
            check_sample(recipe, sample, reset=False)


def training_samples(recipe: Recipe) -> SampleSource:
    """Seeds, or the rows of a dataset in an order that `run.seed` decides."""
    if recipe.data.source == "seeds":
        data = recipe.data
        return SeedSource(data.first_seed, data.num_samples, prompt(recipe), "train", tuple(data.variants))
    if Path(recipe.data.source).resolve() == Path(recipe.data.eval_source).resolve():
        get_logger("data").warning(
            "data.eval_source is data.source: what the run calls held out is trained on; name another file"
        )
    return ListSource(rows(recipe, recipe.data.source), recipe.run.seed)


def held_out_samples(recipe: Recipe) -> list[Sample]:
    """The first `eval.samples` of the held-out dataset, or of the seeds never trained on. The latter are marked as
    held out, for environments that split by more than the seed."""
    count = recipe.eval.samples
    if recipe.data.source == "seeds":
        source = SeedSource(recipe.data.eval_first_seed, max(1, count), prompt(recipe), split="heldout")
        return [source.sample(i) for i in range(count)]
    if count and not recipe.data.eval_source:
        raise ConfigError(f"eval.samples = {count}, but data.eval_source is empty; name a held-out dataset file")
    return rows(recipe, recipe.data.eval_source)[:count] if count else []


def chosen_samples(recipe: Recipe, dataset: str, count: int | None) -> list[Sample]:
    """What an evaluation by itself plays: the first `count` samples of a dataset file, or all of them; of the held-out
    samples where none is named, as many as `eval.samples` says. ValueError if there is none, or the environment cannot
    be built and reset with the first."""
    samples = rows(recipe, dataset)[:count] if dataset else held_out_samples(recipe)
    if not samples:
        raise ConfigError("eval.samples = 0: there is nothing to play; say how many with --samples N")
    check_sample(recipe, samples[0], reset=True)
    return samples


def check_sample(recipe: Recipe, sample: Sample, *, reset: bool) -> None:
    """ValueError if the environment cannot be built with the sample, or then be reset."""
    try:
        env = load_env(recipe.env.module)(sample=sample, args=recipe.env.build_args)
        if reset:
            env.reset()
        env.close()
    except Exception as error:
        raise cannot_play(recipe, sample, error) from error


def cannot_play(recipe: Recipe, sample: Sample, error: Exception) -> ValueError:
    return ValueError(f"env.module = {recipe.env.module!r} cannot play sample {sample.id}: {raised(error)}")


def rows(recipe: Recipe, path: str, most: int | None = None) -> list[Sample]:
    """A dataset's usable rows, or the first of them; what was left out of all is logged. ValueError for a missing file
    or column."""
    text = system_prompt(load_module(recipe.env.module), recipe.env.build_args)
    dataset = load_dataset(path, system_prompt=text, limits=Limits(recipe.transport.max_message_bytes), most=most)
    if most is None:
        get_logger("data").info("%s: %s", path, dataset.report.summary())
    return dataset.samples
