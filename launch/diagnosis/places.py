"""What a recipe names on this machine and around it: model, task, data, run folder, ports, engines that run already."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.diagnosis.report import Finding, failed, not_checked, ok, refused, warning
from launch.engines.network import check_ports, check_reach
from launch.engines.probe import ModelFacts
from launch.task_samples import check_env
from learner.model.sizes import ModelSizes, sizes_of
from learner.plan import check_recipe
from learner.tickets.server import check_address
from shared.config import Recipe
from shared.engine_api import EngineClient, EngineError, each
from shared.keys import actor_security, learner_security, read_api_key
from shared.vision import VisionSpec

GB = 1e9
BYTES_PER_PARAMETER = 12  # of a checkpoint: the parameter and AdamW's two moments, in float32
ANSWER_S = 3.0
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # what the kernel gives to whoever connects


def model_folder(path: str) -> Path | None:
    """Where a model is on this machine; None if it would have to be downloaded first, or is nowhere."""
    if Path(path).exists():
        return Path(path)
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(path, "config.json")
    except ValueError:  # no hub name either
        return None
    return Path(found).parent if isinstance(found, str) else None


def sizes_in(folder: Path | None) -> ModelSizes | None:
    """Of the model in a folder; None where they are not known."""
    if folder is None or not (folder / "config.json").exists():
        return None
    with suppress(ValueError, KeyError):
        return sizes_of(json.loads((folder / "config.json").read_text()))
    return None


def check_model(recipe: Recipe, folder: Path | None) -> Finding:
    """Its files, as far as they can be read quickly; whether the weights are whole shows in the round."""
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
        return refused("model", error, "set model.path to the folder of a Qwen-VL model, or its hub name")
    sizes = sizes_in(folder)
    return ok("model", f"{folder}" + (f", {sizes.parameters / 1e6:.1f} M parameters" if sizes else ""))


def check_task(recipe: Recipe) -> Finding:
    """Its environment, and the files of its data."""
    missing = [path for path in (recipe.data.source, recipe.data.eval_source) if path not in ("", "seeds")]
    missing = [path for path in missing if not Path(path).exists()]
    if missing:
        cure = "python launch/prepare.py makes the data of the shipped recipes; for yours set data.source"
        return failed("task", f"no file {missing[0]}", cure)
    try:
        check_env(recipe)
    except ValueError as error:
        return refused("task", error, "correct env.module and env.args; python -m envs.check plays an environment")
    return ok("task", f"{recipe.env.module}, samples from {recipe.data.source}")


@contextmanager
def run_dir(recipe: Recipe) -> Iterator[Path]:
    """`run.dir`, made where it is not there yet and then taken away again. OSError where that cannot be."""
    folder = Path(recipe.run.dir)
    made = next((path for path in [*reversed(folder.parents), folder] if not path.exists()), None)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty: somebody else uses it by now
            while made is not None and folder != made.parent:
                folder.rmdir()
                folder = folder.parent


def check_run_folder(recipe: Recipe, sizes: ModelSizes | None) -> Finding:
    """Whether it can be written, and has room for the checkpoints."""
    name = f"run.dir = {recipe.run.dir!r}"
    try:
        with run_dir(recipe) as folder, tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written")
            file.flush()
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return failed("run folder", f"{name} cannot be written: {error.strerror}", "set --run.dir to a folder of yours")
    copies = recipe.learner.checkpoint.keep + 1  # the next is written before the oldest goes
    need = copies * BYTES_PER_PARAMETER * sizes.parameters if sizes else 0
    words = f"{name}, {free / GB:.1f} GB free"
    words += f", {need / GB:.1f} GB for {copies} checkpoints" if need >= 0.1 * GB else ""
    if free < max(need, GB):
        return failed("run folder", words, "free some, set --run.dir elsewhere, or lower learner.checkpoint.keep")
    return ok("run folder", words)


def check_keys(recipe: Recipe) -> Finding:
    """The keys of sockets and engines."""
    try:
        learner_security(recipe.transport, recipe.learner.bind)
        actor_security(recipe.transport, recipe.actor.learner)
        key = read_api_key(recipe.engine.api_key_file)
    except ValueError as error:
        return refused("keys", error, "python -m shared.keys makes them")
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
    """Engines and a router that run already: only whether they answer, for they may be serving another run."""
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
    silent = {url: said.reason for url, said in answers.items() if isinstance(said, EngineError)}
    if silent:
        words = "; ".join(f"{url}: {reason}" for url, reason in silent.items())
        return [failed("engines", words, "start them, or correct engine.urls and engine.router")]
    return [ok("engines", f"{len(urls)} answer; the round starts one of its own beside them")]


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
