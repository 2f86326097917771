"""Starts engines and actor processes and watches over them: what is killed or crashes is started again.

python launch/actors.py --config launch/recipes/R.toml --actor.learner tcp://HOST:PORT
python launch/actors.py --config R.toml --actor.learner tcp://HOST:PORT --engine.count 0   # actors alone
python launch/actors.py --config R.toml --actor.learner tcp://HOST:PORT --actor.groups 0   # engines alone
python launch/actors.py --config launch/recipes/R.toml --record DIR     # no learner: groups go into a folder

Actors without engines of their host play on those that the learner names: all engines that other hosts have.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # a Ctrl-C amid these imports waits: as an exception there it leaves a traceback or is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory

from launch.engines.engine_supervisor import EngineServer, check_router, wait_until_serving
from launch.engines.gpus import lock_gpus
from launch.engines.host_engines import check_alone, check_host
from launch.engines.kinds.engine_kind import EngineSpec
from launch.engines.probe import ModelFacts
from launch.processes.actor_supervisor import ActorFailed, ActorProcess
from launch.processes.children import Stopped, raise_if_stopped, run_program, stop_all
from launch.processes.own_server import OwnServer
from launch.processes.restarts import Supervised
from launch.recording import RecordingServer
from launch.task_samples import ready
from launch.terminal.screen import Screen, is_terminal
from launch.terminal.table import process_table
from shared.config.recipe import Recipe, fail, parse, recipe_parser
from shared.engine.engine_api import EngineError
from shared.engine.engine_messages import UNTRAINED
from shared.keys import actor_keys, agents_key, judge_key, read_api_key
from shared.log import get_logger
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules

LOG = get_logger("actors")
MakeServer = Callable[[Recipe, TokenRules], OwnServer]


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("--record", default="", metavar="DIR", help="no learner: groups go into this folder")
    recipe, options = parse(parser, argv)
    return run_to_its_end(recipe, options.record)


def run_to_its_end(recipe: Recipe, folder: str = "") -> int:
    """Do what `run` does in a program of its own; return its exit code. `folder`: where groups are recorded, without a
    learner; "" = there is one."""
    with ExitStack() as cleanup:
        screen = cleanup.enter_context(Screen()) if is_terminal() else None
        try:
            record = partial(RecordingServer, Path(folder)) if folder else None
            return run(recipe, cleanup, record, screen)
        except ActorFailed as failure:
            LOG.error("%s; stopping the others", failure)
            return failure.code
        except (EngineError, ValueError) as error:
            return fail(error)
        except Stopped as stopped:
            LOG.info("%s: stopping", stopped)
            return 130


def run(
    recipe: Recipe,
    cleanup: ExitStack,
    make_server: MakeServer | None = None,
    screen: Screen | None = None,
    *,
    last: bool = True,
) -> int:
    """Start engines, then actors, and keep them alive until the run is over; return the exit code. The actors play the
    learner's tickets. With `make_server` there is no learner: they play the tickets of the server that it makes in this
    process, with the weights that the engines load. `cleanup` ends all started processes; from then on signals are
    ignored, unless this is not the `last` run of the process."""
    recipe = ready(recipe)
    actor_keys(recipe.transport, recipe.actor.learner)  # raises now if the keys are wrong
    api_key = read_api_key(recipe.engine.api_key_file)
    judge_key(recipe.reward.judge)  # likewise
    agents_key(recipe.rollout)
    # Without a learner the engines keep the weights that they load, which then count as version 0.
    model, specs = check(recipe, "0" if make_server else UNTRAINED)
    if make_server:
        check_alone(recipe)
    for spec in specs:
        for lock in lock_gpus(spec.gpus, spec.name, "engine" if spec.shares_gpu else ""):
            cleanup.enter_context(lock)
    journals = ""
    if recipe.journaled:
        journals = cleanup.enter_context(TemporaryDirectory(prefix="pronk-journal-", ignore_cleanup_errors=True))
    engines = [EngineServer(spec, recipe.engine) for spec in specs]
    started: list[Supervised] = [*engines]
    cleanup.callback(lambda: stop_all([each.child for each in started if each.child], last=last))
    for engine in engines:
        engine.start()
    if screen is not None:
        screen.update(f"{len(engines)} engines of this host are starting" if engines else "no engines of this host")
    urls = recipe.engine.urls or tuple(spec.url for spec in specs)
    wait_until_serving(urls, engines, model, recipe.engine.start_limit_s, api_key)
    if recipe.engine.router:
        check_router(recipe.engine.router, model, recipe.engine.start_limit_s, api_key)
    if make_server:
        server = make_server(recipe, TokenRules(model.vision.image_token_id, model.vision.banned_ids, model.vocab_size))
        cleanup.callback(server.close)
        server.begin()
        recipe = server.recipe
    processes = recipe.actor.processes if recipe.actor.groups else 1  # one only reports the engines to the learner
    actors = [ActorProcess(recipe, index, urls, journals) for index in range(processes)]
    started += actors
    for actor in actors:
        actor.start()
    keep_alive(started, actors, screen)
    return 0


def keep_alive(started: Sequence[Supervised], actors: Sequence[Supervised], screen: Screen | None) -> None:
    """Restart processes that fail, until all actors are done: then the run is over."""
    while not all(actor.done for actor in actors):
        for each in started:
            each.keep_alive()
        if screen is not None:
            screen.update(process_table(started, time.monotonic()))
        raise_if_stopped()
        time.sleep(0.2)


def check(recipe: Recipe, weight_version: str = UNTRAINED) -> tuple[ModelFacts, tuple[EngineSpec, ...]]:
    """Return the facts about the model, and the engines to start; `weight_version` is the name of the weights that they
    load. Raise ValueError, in one line, for every mistake that can be found before anything heavy starts."""
    model = recipe.model
    vision = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    return ModelFacts.load(model.path, vision), check_host(recipe, weight_version=weight_version)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.captureWarnings(True)
    run_program(main)
