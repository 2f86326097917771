"""Starts engines and actor processes and watches over them: what is killed or crashes is started again.

python launch/actors.py --config launch/recipes/R.toml --actor.learner tcp://HOST:PORT
python launch/actors.py --config R.toml --actor.learner tcp://HOST:PORT --engine.count 0   # actors alone
python launch/actors.py --config R.toml --actor.learner tcp://HOST:PORT --actor.groups 0   # engines alone
python launch/actors.py --config launch/recipes/R.toml --record DIR     # no learner: groups go into a folder

Actors without engines of their host play on those that the learner names: all engines that other hosts have.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory

from launch.engines.commands import EngineSpec, check_alone, check_host
from launch.engines.gpus import claim
from launch.engines.probe import ModelFacts
from launch.engines.supervisor import Engine, check_router, wait_until_serving
from launch.processes.actor_supervisor import ActorFailed, ActorProcess
from launch.processes.children import Stopped, raise_on_signals, stop_all
from launch.processes.own_server import OwnServer
from launch.processes.restarts import Supervised
from launch.recording import Recording, with_own_weights
from launch.task_samples import ready
from launch.terminal.screen import Screen, is_terminal
from launch.terminal.table import process_table
from shared.codec import TokenRules
from shared.config import Recipe, fail, parse, recipe_parser
from shared.engine_api import EngineError
from shared.keys import actor_security, read_api_key
from shared.log import get_logger
from shared.vision import VisionSpec

LOG = get_logger("actors")
MakeServer = Callable[[Recipe, TokenRules], OwnServer]


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("--record", default="", metavar="DIR", help="no learner: groups go into this folder")
    recipe, options = parse(parser, argv)
    with ExitStack() as cleanup:
        screen = cleanup.enter_context(Screen()) if is_terminal() else None
        try:
            record = partial(Recording, Path(options.record)) if options.record else None
            return run(recipe, cleanup, record, screen)
        except ActorFailed as failure:
            LOG.error("%s; stopping the others", failure)
            return failure.code
        except (EngineError, ValueError) as error:
            return fail(error)
        except Stopped as signal:
            LOG.info("%s: stopping", signal)
            return 130


def run(
    recipe: Recipe,
    cleanup: ExitStack,
    make_server: MakeServer | None = None,
    screen: Screen | None = None,
    *,
    last: bool = True,
) -> int:
    """Starts engines, then actors, and keeps them alive until the run is over. They play what the learner asks for, or,
    with the weights that the engines load, what a server asks for that is made here. `cleanup` ends all that was
    started; signals are ignored from then on, unless more is to be started and this is not the `last`."""
    recipe = ready(recipe)
    actor_security(recipe.transport, recipe.actor.learner)  # what is wrong with the keys is said now
    api_key = read_api_key(recipe.engine.api_key_file)
    model, specs = check(recipe)
    if make_server:
        check_alone(recipe)
        specs = tuple(with_own_weights(spec) for spec in specs)
    raise_on_signals()
    for lock in [lock for spec in specs for lock in claim(spec.gpus, spec.name, "engine" if spec.shares_gpu else "")]:
        cleanup.enter_context(lock)
    journals = ""
    if recipe.journaled:
        journals = cleanup.enter_context(TemporaryDirectory(prefix="pronk-journal-", ignore_cleanup_errors=True))
    engines = [Engine(spec, recipe.engine) for spec in specs]
    started: list[Supervised] = [*engines]
    cleanup.callback(lambda: stop_all([each.child for each in started if each.child], last=last))
    for engine in engines:
        engine.start()
    if screen is not None:
        screen.update(f"{len(engines)} engines of this host are starting" if engines else "no engines of this host")
    urls = recipe.engine.urls or tuple(spec.url for spec in specs)
    wait_until_serving(urls, engines, model, recipe.engine.start_timeout_s, api_key)
    if recipe.engine.router:
        check_router(recipe.engine.router, model, recipe.engine.start_timeout_s, api_key)
    if make_server:
        server = make_server(recipe, TokenRules(model.vision.image_token_id, model.vision.banned_ids, model.vocab_size))
        cleanup.callback(server.close)
        server.begin()
        recipe = server.recipe
    processes = recipe.actor.processes if recipe.actor.groups else 1  # which tells the learner of the engines
    actors = [ActorProcess(recipe, index, urls, journals) for index in range(processes)]
    started += actors
    for actor in actors:
        actor.start()
    keep_alive(started, actors, screen)
    return 0


def keep_alive(started: Sequence[Supervised], actors: Sequence[Supervised], screen: Screen | None) -> None:
    """Until all actors are done, which is the end of the run."""
    while not all(actor.done for actor in actors):
        for each in started:
            each.keep_alive()
        if screen is not None:
            screen.update(process_table(started, time.monotonic()))
        time.sleep(0.2)


def check(recipe: Recipe) -> tuple[ModelFacts, tuple[EngineSpec, ...]]:
    """The model, and the engines to start. ValueError, in one line, for what can be known to be wrong before anything
    heavy starts."""
    model = recipe.model
    vision = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    return ModelFacts.load(model.path, vision), check_host(recipe)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.captureWarnings(True)
    sys.exit(main())
