"""Starts engines and actor processes and watches over them: what is killed or crashes is started again.

python launch/actors.py --config launch/recipes/R.toml --actor.learner tcp://HOST:PORT
python launch/actors.py --config launch/recipes/R.toml --record DIR     # no learner: groups go into a folder
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import logging
import os
import time

from launch.cli import fail, parse, take_option
from launch.engines.commands import EngineSpec, engine_specs
from launch.engines.gpus import claim
from launch.engines.network import check_ports, check_reach
from launch.engines.probe import ModelFacts
from launch.engines.supervisor import Engine, check_router, wait_until_serving
from launch.processes.actor_supervisor import ActorFailed, ActorProcess
from launch.processes.children import Stopped, raise_on_signals, stop_all
from launch.processes.restarts import Restarts
from launch.recording import Recording, with_own_weights
from launch.task_samples import ready
from shared.codec import TokenRules
from shared.config import Recipe
from shared.engine_api import EngineError
from shared.keys import actor_security, read_api_key
from shared.log import get_logger
from shared.sections import EngineConfig
from shared.vision import VisionSpec

LOG = get_logger("actors")


def main(argv: list[str] | None = None) -> int:
    folder, argv = take_option(sys.argv[1:] if argv is None else argv, "--record", "")
    recipe = parse(__doc__, argv)
    recording: Recording | None = None
    actors: list[ActorProcess] = []
    engines: list[Engine] = []
    try:
        recipe = ready(recipe)
        actor_security(recipe.transport, recipe.actor.learner)  # what is wrong with the keys is said now
        api_key = read_api_key(recipe.engine.api_key_file)
        model, specs = check(recipe)
        if folder:
            specs = tuple(with_own_weights(spec) for spec in specs)
        raise_on_signals()
        locks = [claim(spec.gpus, spec.name) for spec in specs]
        LOG.debug("%d GPUs are taken", sum(len(own) for own in locks))
        engines = [engine_of(spec, recipe.engine) for spec in specs]
        for engine in engines:
            engine.start()
        urls = recipe.engine.urls or tuple(spec.url for spec in specs)
        wait_until_serving(urls, engines, model, recipe.engine.start_timeout_s, api_key)
        if recipe.engine.router:
            check_router(recipe.engine.router, model, recipe.engine.start_timeout_s, api_key)
        if folder:
            recording = Recording(recipe, Path(folder), rules(model))
            recipe = recording.recipe
        actors = [ActorProcess(recipe, index, urls) for index in range(recipe.actor.processes)]
        for actor in actors:
            actor.start()
        return supervise(actors, engines)
    except ActorFailed as failure:
        LOG.error("%s; stopping the others", failure)
        return failure.code
    except (EngineError, ValueError) as error:
        return fail(error)
    except Stopped as signal:
        LOG.info("%s: stopping", signal)
        return 130
    finally:
        if recording is not None:
            recording.close()
        children = [*(actor.child for actor in actors), *(engine.child for engine in engines)]
        stop_all([child for child in children if child])


def check(recipe: Recipe) -> tuple[ModelFacts, tuple[EngineSpec, ...]]:
    """The model, and the engines to start. ValueError, in one line, for what can be known to be wrong before anything
    heavy starts."""
    model = recipe.model
    vision = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    facts = ModelFacts.load(model.path, vision)
    if recipe.engine.urls:
        return facts, ()
    check_reach(recipe)
    specs = engine_specs(recipe)
    check_ports(recipe)
    return facts, specs


def engine_of(spec: EngineSpec, engine: EngineConfig) -> Engine:
    return Engine(spec, Restarts(engine.max_restarts), engine.start_timeout_s, engine.silent_timeout_s)


def rules(model: ModelFacts) -> TokenRules:
    return TokenRules(model.vision.image_token_id, model.vision.banned_ids, model.vocab_size)


def supervise(actors: list[ActorProcess], engines: list[Engine]) -> int:
    """Until all actors have ended well, which is the end of the run. What ends otherwise is started again; ActorFailed
    or EngineError when that does not help."""
    while not all(actor.done for actor in actors):
        for actor in actors:
            actor.keep_alive()
        for engine in engines:
            engine.keep_alive()
        time.sleep(0.2)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.captureWarnings(True)
    sys.exit(main())
