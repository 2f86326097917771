"""Makes a recipe's training and held-out samples, with the task's system prompt; checks its environment and data."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from actor.agents.agent_program import Program
from actor.render import Renderer
from envs.datasets import Dataset, load_dataset, weighted
from envs.env_calls import call_within, close_env, make_env, messages_of, play_a_turn, reset_env
from envs.loader import (
    check_settings,
    check_turn_rewards,
    grades_mathematics,
    load_env,
    load_function,
    load_module,
    system_prompt,
    tool_schemas,
)
from envs.messages import split_images
from envs.row_files import dataset_files, share_names
from launch.catalog import sizes_in
from launch.hub import with_local_model
from launch.processes.same_name import check_kernels
from learner.checkpoints.checkpoint_folder import list_checkpoints
from learner.plan.fit import check_context
from learner.tickets.pools import PooledSource
from learner.tickets.sources import ListSource, MixedSource, RoundSource, SampleSource, SeedSource, TaskSource, named
from shared.config.data_section import HELD_OUT_FIRST_SEED
from shared.config.recipe import ConfigError, Recipe
from shared.config.tasks import HeldOutSet, PlayedTask, held_out_sets, tasks_of
from shared.log import get_logger
from shared.types import Sample
from shared.util.user_errors import describe
from shared.vision import VisionSpec
from shared.wire.frames import Limits


def ready(recipe: Recipe) -> Recipe:
    """Return the recipe with its model on this machine. Before anything heavy starts, raise ValueError, in one line,
    for an environment, a function or a model that cannot be used, and for an installed package that hides Pronk's
    `kernels`."""
    check_kernels()
    check_env(recipe)
    recipe = with_local_model(recipe)
    spec = VisionSpec.load(recipe.model.path)
    if sizes := sizes_in(Path(recipe.model.path)):
        check_context("model.max_context", recipe.model.max_context, recipe.model.path, sizes)
    for task in tasks_of(recipe):
        with task.named():
            check_tools(task.recipe)
            if not spec.takes_images:
                check_shows_no_images(task.recipe, spec.family.title)
    return recipe


def check_env(recipe: Recipe) -> None:
    """Load each task's module and play the first turn of a sample, and of one for each variant; load the recipe's
    functions. Raise ValueError if that fails, or for a setting that the module does not have."""
    for task in tasks_of(recipe):
        with task.named():
            check_task(task.recipe)


def check_task(recipe: Recipe) -> None:
    """Do what `check_env` does for a recipe of one task."""
    load_env(recipe.env.module)
    tools(recipe)
    for field, function, kind in (
        ("env.reward", recipe.env.reward, "a function that takes what was played and returns its reward"),
        ("rollout.path", recipe.rollout.path, "an async function that plays an episode"),
        ("rollout.agent", recipe.rollout.agent, "a function run(base_url, sample, args) that plays an episode"),
    ):
        if function:
            check_function(field, function, kind)
    if recipe.rollout.command:
        Program.of(recipe.rollout.command)
    if recipe.reward.url and not recipe.reward.url.startswith(("http://", "https://")):
        raise ConfigError(f"reward.url = {recipe.reward.url!r}: write it as http://host:port/path")
    if recipe.reward.send and not recipe.reward.url:
        raise ConfigError(f"reward.send = {list(recipe.reward.send)} without reward.url: it says what that server gets")
    if recipe.reward.judge.url:
        recipe.reward.judge.rubric_text()
    if "max_turns" in recipe.env.args:
        raise ConfigError(f"env.args has max_turns = {recipe.env.args['max_turns']!r}: set env.max_turns")
    check_build(recipe, "env.args", {})
    for variant in recipe.data.variants:
        check_build(recipe, f"data.variants = {variant}", variant)


def check_function(field: str, path: str, kind: str) -> None:
    """Raise ValueError, which names the field and the required `kind` of function, if there is no function at
    `path`."""
    try:
        load_function(path)
    except ValueError as error:
        raise ValueError(f"{field} = {path!r} is to be {kind}: {error}") from error


def why_turn_rewards_are_unused(recipe: Recipe) -> str:
    """Return why no reward of a single turn is trained on; "" if they are."""
    objective = recipe.learner.objective
    if objective.is_group_relative and not objective.has_turn_advantages:
        return f"learner.objective.name = {objective.name!r} compares whole episodes"
    if objective.has_critic and not objective.turn_rewards:
        return "learner.objective.turn_rewards = false trains on whole episodes"
    return "env.reward or reward.url replaces them" if recipe.env.reward or recipe.reward.url else ""


def check_build(recipe: Recipe, place: str, variant: dict[str, Any]) -> None:
    """Raise ValueError, which names `place`, if the environment cannot be built with `variant` on top of `env.args`, or
    its first turn cannot be played; the latter is a warning if the run has begun."""
    if not recipe.rollout.function:  # a rollout function may have its own settings
        module, values = load_module(recipe.env.module), {**recipe.env.build_args, **variant}
        check_settings(module, values, place)
        if why := why_turn_rewards_are_unused(recipe):
            check_turn_rewards(module, values, place, f"{why}: leave it out, or change that")
    sample = Sample("check", metadata={"seed": 0} | ({"env_config": variant} if variant else {}))
    build = partial(make_env, load_env(recipe.env.module), sample=sample, args=recipe.env.build_args)
    try:
        if recipe.rollout.function or recipe.data.source != "seeds":  # samples of rows are tried when the data is read
            close_env(call_within(recipe.env.timeout_s, "build_env", build))
        else:
            call_within(recipe.env.timeout_s, "a first turn", first_turn(recipe, build))
    except Exception as error:  # noqa: BLE001 - it is the user's code
        where = f"env.module = {recipe.env.module!r}"
        settings = f", with {place}" if recipe.env.args or variant else ""
        refuse_unless_begun(recipe, ValueError(f"{where} cannot be played{settings}: {describe(error)}"), error)


def first_turn(recipe: Recipe, build: Callable[[], Any]) -> Callable[[], None]:
    """Return the call that plays the first turn of an environment as the recipe's objective needs it."""
    return partial(play_a_turn, build, has_states=recipe.learner.objective.turn_advantage == "state")


def refuse_unless_begun(recipe: Recipe, mistake: ValueError, cause: Exception) -> None:
    """Raise a mistake that a first turn has shown, unless the run has been trained already: then what fails may pass,
    its episodes are counted, and the run goes on."""
    if not has_begun(recipe):
        raise mistake from cause
    if os.environ.get("RANK", "0") == "0":
        get_logger("samples").warning("%s; the run has begun, so it goes on, and what fails is counted", mistake)


def has_begun(recipe: Recipe) -> bool:
    """Tell whether this start goes on from a checkpoint of the run itself."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if recipe.learner.resume != "auto" and not is_restart:
        return False
    return bool(list_checkpoints(Path(recipe.run.dir) / recipe.run.name / "checkpoints"))


def prompt(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """Return the messages before the first observation."""
    text = system_prompt(load_module(recipe.env.module), recipe.env.build_args)
    return ({"role": "system", "content": text},) if text else ()


def tools(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """Return the schemas of the environment's tools. Raise ValueError for one of which a model could not be told."""
    return tool_schemas(load_module(recipe.env.module), recipe.env.build_args)


def check_data(recipe: Recipe) -> None:
    """Raise ValueError for a data file without a readable sample or with a first sample for which no environment can be
    built, for a held-out file that would not be used, and for settings of a held-out set that its task does not
    have."""
    for task in tasks_of(recipe):
        with task.named():
            check_data_of_task(task.recipe)
    for each in recipe.eval.sets:
        task = next(task for task in tasks_of(recipe) if task.name == each.task)
        place = f"eval.sets: {each.name!r}"
        if each.env_config and task.recipe.data.source != "seeds":
            raise ConfigError(f"{place} has env_config, which is for seeds; name a source, or leave it out")
        with task.named():
            if each.env_config:
                check_build(task.recipe, f"{place}, env_config = {each.env_config}", each.env_config)
            if each.source:
                check_rows(task.recipe, each.source)


def check_data_of_task(recipe: Recipe) -> None:
    """Check the training data of a recipe of one task, and its own held-out data."""
    data = recipe.data
    if data.source == "seeds":
        if data.eval_source:
            raise ConfigError(
                f"data.eval_source = {data.eval_source!r}, but data.source = 'seeds', whose held-out samples are seeds "
                "too: leave it out, or name a file as data.source"
            )
        return
    if recipe.eval.samples and not data.eval_source:
        raise ConfigError(
            f"data.source = {data.source!r}, but data.eval_source is empty: name a held-out dataset file, or set "
            f"eval.samples = 0 (now {recipe.eval.samples})"
        )
    for path in (*data.paths, *([data.eval_source] if recipe.eval.samples else [])):
        check_rows(recipe, path)


def check_rows(recipe: Recipe, path: str) -> None:
    """Raise ValueError for a dataset without a readable sample, or whose first one cannot be played."""
    sample = rows(recipe, path, most=1)[0]
    if not recipe.rollout.function:
        check_sample(recipe, sample)


def training_samples(recipe: Recipe) -> SampleSource:
    """Return the source of training samples: of each task seeds, or the rows of a dataset in an order determined by
    `run.seed`; those of several tasks in turns. Raise ValueError if the policy could not read what an environment
    shows."""
    sources = []
    for task in tasks_of(recipe):
        with task.named():
            sources.append(TaskSource(task.name, source_of_task(task), task.weight))
    if recipe.pools:
        return PooledSource(sources, recipe.pools, recipe.run.seed)
    return MixedSource(sources) if recipe.tasks else sources[0].source


def source_of_task(task: PlayedTask) -> RoundSource:
    """Return the source of one task's training samples."""
    recipe = task.recipe
    data = recipe.data
    check_observation(recipe)
    if data.source == "seeds":
        variants = tuple(data.variants)
        return SeedSource(
            data.first_seed, data.num_samples, prompt(recipe), "train", variants, tools(recipe), task.name
        )
    if data.eval_source and Path(data.eval_source).resolve() in [Path(path).resolve() for path in data.paths]:
        get_logger("data").warning(
            "data.eval_source is data.source: what the run calls held out is trained on; name another file"
        )
    share = share_names(dataset_files(data.paths))
    sources = data.paths if data.weights else (data.paths,)
    groups = [rows(recipe, source, with_folders=share) for source in sources]
    samples = weighted([[named(sample, task.name) for sample in group] for group in groups], data.weights)
    return ListSource(samples, recipe.run.seed)


def held_out_samples(recipe: Recipe) -> list[Sample]:
    """Return the samples of all held-out sets: of each the first of its dataset, or of the held-out seeds. Samples of
    seeds are marked as held out, for environments that split by more than the seed."""
    samples = []
    for each in held_out_sets(recipe):
        with each.task.named():
            samples += samples_of(each)
    return samples


def samples_of(held_out: HeldOutSet) -> list[Sample]:
    """Return the samples of one held-out set."""
    task, recipe, count = held_out.task, held_out.task.recipe, held_out.count
    if not held_out.source and recipe.data.source == "seeds":
        variants = (dict(held_out.env_config),) if held_out.env_config else ()
        first, names = HELD_OUT_FIRST_SEED, (task.name, held_out.name)
        source = SeedSource(first, max(1, count), prompt(recipe), "heldout", variants, tools(recipe), *names)
        return [source.sample(i) for i in range(count)]
    if count and not held_out.source:
        raise ConfigError(f"eval.samples = {count}, but data.eval_source is empty: name a held-out dataset file")
    found = rows(recipe, held_out.source)[:count] if count else []
    return [named(sample, task.name, held_out.name) for sample in found]


def chosen_samples(recipe: Recipe, dataset: str, count: int | None) -> list[Sample]:
    """Return the samples of a separate evaluation: the first `count` samples of a dataset file (None: all), or without
    a file the held-out samples. Raise ValueError if there are none, or if an environment cannot play a first turn with
    the first of its task."""
    tasks = tasks_of(recipe)
    if dataset and len(tasks) > 1:
        names = ", ".join(task.name for task in tasks)
        raise ConfigError(f"--dataset {dataset} is of one task, and the recipe has several: {names}; leave it out")
    for task in tasks:
        with task.named():
            check_observation(task.recipe)
    task = tasks[0]
    samples = held_out_samples(recipe)
    if dataset:
        samples = [named(sample, task.name, task.name) for sample in rows(task.recipe, dataset)[:count]]
    if not samples:
        raise ConfigError("eval.samples = 0: there is nothing to play; say how many with --samples N")
    for task in tasks:
        if first := next((sample for sample in samples if sample.task == task.name), None):
            check_sample(task.recipe, first)
    return samples


def check_sample(recipe: Recipe, sample: Sample) -> None:
    """Raise ValueError if the environment cannot be built with the sample, or its first turn cannot be played."""
    build = partial(make_env, load_env(recipe.env.module), sample=sample, args=recipe.env.build_args)
    try:
        call_within(recipe.env.timeout_s, "a first turn", first_turn(recipe, build))
    except Exception as error:  # noqa: BLE001 - it is the user's code
        refuse_unless_begun(recipe, cannot_play(recipe, sample, error), error)


def check_tools(recipe: Recipe) -> None:
    """Raise ValueError if the model's chat template leaves out the environment's tools, or their results."""
    if not recipe.rollout.function and (schemas := tools(recipe)):
        renderer = renderer_of(recipe)
        renderer.start([{"role": "user", "content": "?"}], tools=schemas)
        renderer.observation({"role": "tool", "content": "the first result"})


def check_shows_no_images(recipe: Recipe, title: str) -> None:
    """Raise ValueError if the first observation of a sample has images, for a text model; `title` is its family's. Rows
    of a dataset are tried when they are read."""
    if recipe.rollout.function or recipe.data.source != "seeds":
        return
    for variant in ({}, *recipe.data.variants):
        if call_within(recipe.env.timeout_s, "a first observation", partial(shows_images, recipe, variant)):
            raise ConfigError(
                f"env.module = {recipe.env.module!r} shows images, and model.path = {recipe.model.path!r} is a text "
                f"model ({title}): name a vision-language model, or let the environment show text (most take "
                'env.args.render_mode = "text")'
            )


def shows_images(recipe: Recipe, variant: dict[str, Any]) -> bool:
    """Tell whether the first observation of an environment with `variant` has images."""
    sample = Sample("check", metadata={"seed": 0} | ({"env_config": variant} if variant else {}))
    env = make_env(load_env(recipe.env.module), sample=sample, args=recipe.env.build_args)
    observation, _ = reset_env(env)
    messages = messages_of(env, observation) if observation else []
    close_env(env)
    return bool(split_images(messages, iter(()))[1])


def check_observation(recipe: Recipe) -> None:
    """Raise ValueError if the model's chat template leaves out the environment's tools and their results, or messages
    of the role that its observations have. An environment that formats no observation but its own is not checked."""
    if recipe.rollout.function:
        return
    check_tools(recipe)
    try:
        sample = Sample("check", metadata={"seed": 0})
        env = make_env(load_env(recipe.env.module), sample=sample, args=recipe.env.build_args)
        messages = messages_of(env, {"obs_str": "the first observation"})
        close_env(env)
    except Exception:  # noqa: BLE001 - its observations may need other keys, or a dataset's sample
        return
    renderer_of(recipe).observation(*messages)


def cannot_play(recipe: Recipe, sample: Sample, error: Exception) -> ValueError:
    return ValueError(f"env.module = {recipe.env.module!r} cannot play sample {sample.id}: {describe(error)}")


def rows(
    recipe: Recipe, path: str | tuple[str, ...], most: int | None = None, *, with_folders: bool = False
) -> list[Sample]:
    """Return a dataset's usable rows as samples, at most `most`; without `most` also leave out those that the policy
    can never be shown, and log what was left out. Raise ValueError for a missing file or column, or if no sample is
    left."""
    module = load_module(recipe.env.module)
    dataset = load_dataset(
        path,
        system_prompt=system_prompt(module, recipe.env.build_args),
        tools=tool_schemas(module, recipe.env.build_args),
        limits=Limits(recipe.transport.max_message_bytes),
        most=most,
        columns=recipe.data.columns,
        image_cache=recipe.data.image_cache,
        with_folders=with_folders,
        # A reward of the user's own may read labels of any form.
        is_mathematics=grades_mathematics(module) and not (recipe.env.reward or recipe.reward.url),
    )
    if most is not None:
        return dataset.samples
    report = dataset.report
    samples = playable(recipe, dataset)
    log = get_logger("data")
    shown = path if isinstance(path, str) else ", ".join(path)
    (log.warning if report.is_alarming else log.info)("%s: %s", shown, report.summary())
    if not samples:
        raise ValueError(f"{path} holds no sample that can be played: {report.summary()}")
    return samples


def playable(recipe: Recipe, dataset: Dataset) -> list[Sample]:
    """Return the samples whose prompt fits into the context and whose images the model can be shown; count the others
    in the report. A rollout function or an agent may make prompts of its own: all are
    returned then."""
    if recipe.rollout.function:
        return dataset.samples
    renderer, max_context = renderer_of(recipe), recipe.model.max_context
    report, samples = dataset.report, []
    for sample in dataset.samples:
        row = sample.metadata.get("row", sample.id)
        try:
            num_tokens = renderer.num_prompt_tokens(sample.prompt, sample.images, sample.tools) if sample.prompt else 0
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything
            report.note("cannot_be_shown", row, " ".join(str(error).split()))
            continue
        if num_tokens >= max_context:
            report.note("too_long", row, f"{num_tokens:,} of {max_context:,} tokens")
            continue
        samples.append(sample)
    report.samples = len(samples)
    return samples


def renderer_of(recipe: Recipe) -> Renderer:
    """Return the renderer with which actors will play. Raise ValueError if the model's tokenizer cannot be read, or its
    chat template not be used."""
    from transformers import PreTrainedTokenizerFast

    model = recipe.model
    spec = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    return Renderer(PreTrainedTokenizerFast.from_pretrained(model.path), spec)
