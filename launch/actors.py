"""Starts engines and actor processes and watches over them: one failure stops all, with its reason.

python launch/actors.py --config launch/recipes/R.toml --actor.learner tcp://HOST:PORT
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import asyncio
import json
import logging
import os
import socket

from actor.client import EngineClient, EngineError
from launch.cli import fail, parse
from launch.processes import Child, Stopped, cpu_env, raise_on_signals, start, stop_all, wait_for_any
from launch.samples import ready
from shared.config import ConfigError, Recipe
from shared.log import get_logger

LOG = get_logger("actors")


def main(argv: list[str] | None = None) -> int:
    recipe = parse(__doc__, sys.argv[1:] if argv is None else argv)
    try:
        recipe = ready(recipe)
        check_ports(recipe)
    except ValueError as error:
        return fail(error)
    raise_on_signals()
    children: list[Child] = []
    try:
        urls = start_engines(recipe, children)
        wait_for_engines(recipe, urls, children)
        for index in range(recipe.actor.processes):
            children.append(start_actor(recipe, index, urls))
        return supervise(children)
    except (EngineError, ConfigError) as error:
        return fail(error)
    except Stopped as signal:
        LOG.info("%s: stopping", signal)
        return 130
    finally:
        stop_all(children)


def check_ports(recipe: Recipe) -> None:
    """ValueError, in one line, for an engine's port that is occupied."""
    if recipe.engine.urls:
        return
    for port in range(recipe.engine.port, recipe.engine.port + recipe.engine.count):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise ConfigError(
                    f"engine.port = {recipe.engine.port}: port {port} is occupied; choose another one (--engine.port)"
                ) from None


def start_engines(recipe: Recipe, children: list[Child]) -> tuple[str, ...]:
    """Starts what the recipe asks for; returns the engines' addresses."""
    engine, model = recipe.engine, recipe.model
    if engine.urls:
        return engine.urls
    urls = []
    for port in range(engine.port, engine.port + engine.count):
        command = [sys.executable, "-m", "actor.engine.server", "--model-path", model.path, "--port", str(port)]
        command += ["--device", engine.device, "--dtype", model.dtype, "--threads", str(engine.threads)]
        command += ["--max-batch", str(engine.max_batch), "--max-context", str(model.max_context)]
        command += ["--min-pixels", str(model.min_pixels), "--max-pixels", str(model.max_pixels)]
        children.append(start(f"engine on port {port}", command, env=cpu_env(engine.threads)))
        urls.append(f"http://127.0.0.1:{port}")
    return tuple(urls)


def wait_for_engines(recipe: Recipe, urls: tuple[str, ...], children: list[Child]) -> None:
    """Returns when all answer. EngineError when one does not in time, or has ended."""

    async def wait() -> None:
        clients = [EngineClient(url) for url in urls]
        tasks = [asyncio.create_task(client.wait_healthy(recipe.engine.start_timeout_s)) for client in clients]
        while not all(task.done() for task in tasks):
            for child in children:
                if (code := child.process.poll()) is not None:
                    raise EngineError(
                        f"{child.name} ended with exit code {code} while starting; its last lines are above"
                    )
            await asyncio.sleep(0.1)
        for task in tasks:
            await task

    asyncio.run(wait())


def start_actor(recipe: Recipe, index: int, urls: tuple[str, ...]) -> Child:
    """The actor process gets its resolved settings through its environment."""
    settings = {"recipe": recipe.model_dump(mode="json"), "index": index, "engine_urls": urls}
    name = f"actor {index}"
    command = [sys.executable, "-m", "actor.worker"]
    return start(name, command, env={"PRONK_ACTOR": json.dumps(settings), "OMP_NUM_THREADS": "1"})


def supervise(children: list[Child]) -> int:
    """Waits until an actor or engine ends. All actors ending well is the end of the run; anything else is a failure."""
    actors = [child for child in children if child.name.startswith("actor")]
    while True:
        ended = wait_for_any(children)
        code = ended.process.returncode
        if code or ended not in actors:
            LOG.error("%s ended with exit code %d; stopping the others", ended.name, code)
            return code or 1
        ended.required = False
        if not any(actor.required for actor in actors):
            return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.captureWarnings(True)
    sys.exit(main())
