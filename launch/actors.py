"""Starts engines and actor processes and watches over them: an actor's failure stops all, an engine is started again.

python launch/actors.py --config launch/recipes/R.toml --actor.learner tcp://HOST:PORT
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import logging
import os
import time

from actor.client import EngineError
from launch.cli import fail, parse
from launch.engine_check import ModelFacts
from launch.engines import EngineSpec, check_ports, engine_specs
from launch.gpus import claim
from launch.keeper import Engine, wait_until_serving
from launch.processes import Child, Stopped, raise_on_signals, start, stop_all
from launch.samples import ready
from shared.config import Recipe
from shared.log import get_logger
from shared.vision import VisionSpec

LOG = get_logger("actors")


def main(argv: list[str] | None = None) -> int:
    recipe = parse(__doc__, sys.argv[1:] if argv is None else argv)
    children: list[Child] = []
    engines: list[Engine] = []
    try:
        recipe = ready(recipe)
        model, specs = check(recipe)
        raise_on_signals()
        locks = [claim(spec.gpus, spec.name) for spec in specs]
        LOG.debug("%d GPUs are taken", sum(len(own) for own in locks))
        engines = [Engine(spec) for spec in specs]
        for engine in engines:
            engine.start()
        urls = recipe.engine.urls or tuple(spec.url for spec in specs)
        wait_until_serving(urls, engines, model, recipe.engine.start_timeout_s)
        for index in range(recipe.actor.processes):
            children.append(start_actor(recipe, index, urls))
        return supervise(children, engines, recipe.engine.max_restarts)
    except (EngineError, ValueError) as error:
        return fail(error)
    except Stopped as signal:
        LOG.info("%s: stopping", signal)
        return 130
    finally:
        stop_all([*children, *(engine.child for engine in engines if engine.child)])


def check(recipe: Recipe) -> tuple[ModelFacts, tuple[EngineSpec, ...]]:
    """The model, and the engines to start. ValueError, in one line, for what can be known to be wrong before anything
    heavy starts."""
    model = recipe.model
    vision = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    facts = ModelFacts.load(model.path, vision)
    if recipe.engine.urls:
        return facts, ()
    specs = engine_specs(recipe)
    check_ports(recipe)
    return facts, specs


def start_actor(recipe: Recipe, index: int, urls: tuple[str, ...]) -> Child:
    """The actor process gets its resolved settings through its environment."""
    settings = {"recipe": recipe.model_dump(mode="json"), "index": index, "engine_urls": urls}
    name = f"actor {index}"
    command = [sys.executable, "-m", "actor.worker"]
    return start(name, command, env={"PRONK_ACTOR": json.dumps(settings), "OMP_NUM_THREADS": "1"})


def supervise(actors: list[Child], engines: list[Engine], max_restarts: int) -> int:
    """Waits until the actors end: all of them well is the end of the run, one with an error stops the others. An engine
    that ends meanwhile is started again; EngineError when that does not help."""
    while True:
        for actor in actors:
            code = actor.process.poll()
            if code:
                LOG.error("%s ended with exit code %d; stopping the others", actor.name, code)
                return code
        if all(actor.process.returncode == 0 for actor in actors):
            return 0
        for engine in engines:
            engine.keep_alive(max_restarts)
        time.sleep(0.2)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.captureWarnings(True)
    sys.exit(main())
