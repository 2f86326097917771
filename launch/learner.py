"""The learner, on any number of ranks:

torchrun --nproc-per-node N launch/learner.py --config launch/recipes/R.toml [--from-recording DIR]

With --from-recording it trains on groups that launch/actors.py --record has written, without actors or engines.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import logging
import os
import signal
import time
from typing import TextIO

from actor.isolation.lifeline import die_with_parent
from launch.engines.gpus import claim, names
from launch.processes.children import Stopped, raise_on_signals
from launch.processes.run_folder import prepare_run_folder, take_run_folder
from launch.task_samples import check_data, held_out_samples, ready, training_samples
from learner.checkpoints.folder import check_resume
from learner.metrics.services import check_writers
from learner.shutdown import Shutdown, ShutdownRequested
from learner.tickets.server import check_address
from learner.tickets.sources import SeedSource
from shared.config import EXIT_USER_ERROR, Recipe, fail, parse, recipe_parser
from shared.guards.memory import bound_kernel_caches, keep_heap, kept_for_ever, use_one_heap
from shared.keys import learner_security, read_api_key
from shared.log import get_logger
from shared.nccl import variables

OTHERS_WAIT_S = 3.0


def main(argv: list[str] | None = None) -> int:
    use_one_heap()
    bound_kernel_caches()
    parser = recipe_parser(__doc__)
    parser.add_argument("--from-recording", default="", metavar="DIR", help="train on these groups, without actors")
    recipe, options = parse(parser, argv)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        keep_heap()
    if recipe.learner.device == "cuda":
        os.environ.update(variables.settings(os.environ))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)  # a rank never outlives its torchrun
    try:
        recipe = ready(recipe)
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if restarted and recipe.learner.resume == "never":  # torchrun's restarts go on with the run
            recipe = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"resume": "auto"})})
        if rank == 0:
            check_cheaply(recipe)
            held = take_run_folder(recipe)  # as the GPU is, until the process ends
            check_address(recipe.learner.bind)
            held = prepare_run_folder(recipe, held, restarted=restarted)
        shutdown = heed_signals(recipe)
        _gpu = claim_gpu(recipe, rank)
        if options.from_recording:
            from learner.offline import run_recorded

            print(json.dumps(run_recorded(recipe, Path(options.from_recording))), flush=True)
            return 0
        with kept_for_ever():
            from learner.loop import run  # torch and transformers, after the cheap checks

        samples = (training_samples(recipe), held_out_samples(recipe)) if rank == 0 else (SeedSource(), [])
        result = run(recipe, *samples, shutdown)
    except ShutdownRequested as left:
        get_logger(f"learner[{rank}]").info("%s", left)
        return 130
    except (ValueError, TimeoutError) as error:
        logging.getLogger("pronk").debug("", exc_info=True)
        return fail_once(error, rank)
    except Stopped as stopped:
        get_logger(f"learner[{rank}]").info("%s: stopping", stopped)
        return 130
    if result is not None:
        print(json.dumps(result.as_dict()), flush=True)
    return 0


def check_cheaply(recipe: Recipe) -> None:
    """ValueError for what can be known to be wrong before a run that is there is moved aside: keys, writers, data."""
    learner_security(recipe.transport, recipe.learner.bind)
    read_api_key(recipe.engine.api_key_file)
    check_writers(recipe)
    check_data(recipe)
    check_resume(recipe.learner.resume)


def heed_signals(recipe: Recipe) -> Shutdown:
    """From here on a signal raises `Stopped`. The process also ends in time where that is lost: in an import, say."""
    raise_on_signals()
    shutdown = Shutdown(recipe.learner.leave_timeout_s)
    shutdown.guard()
    return shutdown


def fail_once(error: Exception, rank: int) -> int:
    """As `fail`. What is wrong for all ranks is said by the first; torchrun then ends the others before they say it."""
    try:
        time.sleep(OTHERS_WAIT_S if rank else 0.0)
    except Stopped:
        return EXIT_USER_ERROR
    return fail(error)


def claim_gpu(recipe: Recipe, rank: int) -> list[TextIO]:
    """Keeps this rank's GPU for as long as the process lives. ConfigError if another process of Pronk has it."""
    if recipe.learner.device != "cuda":
        return []
    gpu = names([int(os.environ.get("LOCAL_RANK", "0"))], os.environ)
    return claim(gpu, f"learner rank {rank}", "learner" if recipe.engine.shares_gpu else "")


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # A thread that is still inside a call of torch's when the interpreter ends would abort a run that has ended well.
    os._exit(code)
