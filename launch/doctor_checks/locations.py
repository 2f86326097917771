"""Checks of what a recipe refers to: model, task, data, run folder, keys, ports, and engines that run already."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

from launch.catalog import sizes_in
from launch.engines.network import check_ports, check_reach
from launch.engines.probe import ModelFacts
from launch.findings import Finding, failed, not_checked, ok, refused, warning
from launch.task_samples import check_env
from learner.plan.fit import check_recipe
from learner.tickets.ticket_server import check_address
from shared.config.recipe import Recipe
from shared.config.tasks import tasks_of
from shared.engine.engine_api import EngineClient, EngineError, each
from shared.families.model_sizes import ModelSizes
from shared.keys import actor_keys, learner_keys, read_api_key
from shared.util.own_commands import command
from shared.vision import VisionSpec

GB = 1e9
BYTES_PER_PARAMETER = 12  # in a checkpoint: the parameter and AdamW's two moments, in float32
ANSWER_S = 3.0
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # ports that the kernel assigns to outgoing connections


def check_model(recipe: Recipe, folder: Path | None) -> Finding:
    """Check those files of the model that can be read quickly; the trial shows whether the weights are complete."""
    path = recipe.model.path
    if folder is None and path.count("/") == 1 and not path.startswith((".", "/")):
        return not_checked("model", f"{path} is not on this machine", "the first start downloads it from the hub")
    if folder is None:
        return failed("model", f"model.path = {path!r} is no folder here, and no hub name", "name a model's folder")
    try:
        ModelFacts.load(str(folder), VisionSpec.load(folder))
        check_recipe(recipe, 1, None)
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"{folder} has no .safetensors file; download the model again")
    except (ValueError, OSError, KeyError) as error:
        return refused("model", error, "set model.path to the folder of a model, or its hub name")
    sizes = sizes_in(folder)
    return ok("model", f"{folder}" + (f", {sizes.parameters / 1e6:.1f} M parameters" if sizes else ""))


def has_files(path: str) -> bool:
    """Tell whether there is a file, a folder, or a file that matches a pattern."""
    return Path(path).exists() or bool(glob(path))


def check_task(recipe: Recipe) -> Finding:
    """Check the task's environment and data files."""
    tasks = [task.recipe for task in tasks_of(recipe)]
    named = [path for task in tasks for path in (*task.data.paths, task.data.eval_source)]
    missing = [path for path in named if path]
    missing = [path for path in missing if not has_files(path)]
    if missing:
        cure = f"{command('prepare')} makes the data of the shipped recipes; for yours set data.source"
        return failed("task", f"no file {missing[0]}", cure)
    try:
        check_env(recipe)
    except ValueError as error:
        return refused("task", error, f"correct env.module and env.args; {command('check')} plays an environment")
    sources = [(task.env.module, ", ".join(task.data.paths) or "seeds") for task in tasks]
    return ok("task", "; ".join(f"{module}, samples from {source}" for module, source in sources))


@contextmanager
def run_dir(recipe: Recipe) -> Iterator[Path]:
    """Yield `run.dir`; if it does not exist, make it and remove it afterwards. Raise OSError if it cannot be made."""
    folder = Path(recipe.run.dir)
    made = next((path for path in [*reversed(folder.parents), folder] if not path.exists()), None)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty: another process uses it by now
            while made is not None and folder != made.parent:
                folder.rmdir()
                folder = folder.parent


def check_run_folder(recipe: Recipe, sizes: ModelSizes | None) -> Finding:
    """Check that the run's folder can be written and has room for the checkpoints."""
    name = f"run.dir = {recipe.run.dir!r}"
    try:
        with run_dir(recipe) as folder, tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written")
            file.flush()
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return failed("run folder", f"{name} cannot be written: {error.strerror}", "set --run.dir to a folder of yours")
    copies = recipe.learner.checkpoint.keep + 1  # a new one is written before the oldest is deleted
    need = copies * BYTES_PER_PARAMETER * sizes.parameters if sizes else 0
    words = f"{name}, {free / GB:.1f} GB free"
    words += f", {need / GB:.1f} GB for {copies} checkpoints" if need >= 0.1 * GB else ""
    if free < max(need, GB):
        return failed("run folder", words, "free some, set --run.dir elsewhere, or lower learner.checkpoint.keep")
    return ok("run folder", words)


def check_keys(recipe: Recipe) -> Finding:
    """Check the keys of sockets and engines."""
    try:
        learner_keys(recipe.transport, recipe.learner.bind)
        actor_keys(recipe.transport, recipe.actor.learner)
        key = read_api_key(recipe.engine.api_key_file)
    except ValueError as error:
        return refused("keys", error, f"{command('keys')} makes them")
    words = "for the sockets" if recipe.transport.keys else "none needed on loopback"
    return ok("keys", words + (", and for the engines" if key else ""))


def check_learner_port(recipe: Recipe) -> Finding:
    name = "learner port"
    try:
        check_address(recipe.learner.bind)
    except ValueError as error:
        return refused(name, error, "stop what listens there, or set --learner.bind and --actor.learner")
    return ok(name, f"{recipe.learner.bind} is free")


def check_engine_ports(recipe: Recipe, ephemeral: Path = EPHEMERAL) -> Finding:
    name, engine = "engine ports", recipe.engine
    if engine.elsewhere:
        return not_checked(name, "the recipe's engines run elsewhere (engine.urls, or engine.count = 0)")
    try:
        check_reach(recipe)
        check_ports(recipe)
    except ValueError as error:
        return refused(name, error, "correct engine.host and engine.port")
    last = engine.port + engine.count - 1
    words = f"{engine.port}" if last == engine.port else f"{engine.port} to {last}"
    if ephemeral.exists():
        low, high = map(int, ephemeral.read_text().split())
        if engine.port <= high and last >= low:
            cure = f"choose --engine.port below {low}"
            return warning(name, f"{words} free now, but the kernel gives out {low} to {high} to anybody", cure)
    return ok(name, f"{words} on {engine.host} free")


def check_urls(recipe: Recipe) -> list[Finding]:
    """Check only that engines and a router that run already answer; no more, since they may be serving another run."""
    urls = [url for url in (*recipe.engine.urls, recipe.engine.router) if url]
    if not urls:
        return []

    async def ask(url: str) -> str:
        async with EngineClient(url, api_key=read_api_key(recipe.engine.api_key_file)) as client:
            await client.health(ANSWER_S)
        return url

    try:
        answers = asyncio.run(each(urls, ask))
    except ValueError as error:
        return [refused("engines", error, "correct engine.urls")]
    silent = {url: answer.reason for url, answer in answers.items() if isinstance(answer, EngineError)}
    if silent:
        words = "; ".join(f"{url}: {reason}" for url, reason in silent.items())
        return [failed("engines", words, "start them, or correct engine.urls and engine.router")]
    return [ok("engines", f"{len(urls)} answer; the trial starts one of its own beside them")]


def check_places(recipe: Recipe, folder: Path | None) -> list[Finding]:
    return [
        check_model(recipe, folder),
        check_task(recipe),
        check_run_folder(recipe, sizes_in(folder)),
        check_keys(recipe),
        check_learner_port(recipe),
        check_engine_ports(recipe),
        *check_urls(recipe),
    ]
