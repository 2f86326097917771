"""The learner, on any number of ranks:

torchrun --nproc-per-node N launch/learner.py --config launch/recipes/R.toml [--from-recording DIR]
python launch/learner.py --ranks N --config launch/recipes/R.toml     # the same on one host; a mistake is one line

With --from-recording it trains on groups that launch/actors.py --record has written, without actors or engines.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # a Ctrl-C amid these imports waits: as an exception there it leaves a traceback or is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from actor.isolation.lifeline import die_with_parent
from launch.engines.gpus import gpu_names, lock_gpus
from launch.processes.children import ROOT, Stopped, module_path, run_program
from launch.processes.run_folder import prepare_run_folder, take_run_folder
from launch.task_samples import check_data, held_out_samples, ready, training_samples
from launch.teachers import check_teacher
from learner import profile_request
from learner.checkpoints.checkpoint_folder import check_resume
from learner.metrics.metric_services import check_writers
from learner.shutdown import Shutdown, ShutdownRequested
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_server import check_address
from shared.config.recipe import EXIT_USER_ERROR, ConfigError, Recipe, fail, parse, recipe_parser
from shared.engine import nccl_variables
from shared.keys import learner_keys, read_api_key
from shared.log import get_logger
from shared.run_status import StatusFile
from shared.util.process_memory import bound_kernel_caches, keep_heap, kept_for_ever, use_one_heap
from shared.util.user_errors import describe

OTHERS_WAIT_S = 3.0


def main(argv: list[str] | None = None) -> int:
    use_one_heap()
    bound_kernel_caches()
    profile_request.heed()
    parser = recipe_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this host, like torchrun")
    parser.add_argument("--from-recording", default="", metavar="DIR", help="train on these groups, without actors")
    parser.add_argument("--shuffle", action="store_true", help="recorded groups come in another order each time")
    recipe, options = parse(parser, argv)
    if options.ranks != 1:
        return start_ranks(options)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        keep_heap()
    if recipe.learner.device == "cuda":
        os.environ.update(nccl_variables.settings(os.environ))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)  # so that a rank never outlives torchrun
    try:
        recipe, status, _lock = prepare(ready(recipe), rank)  # the lock is held until the process ends
        with recorded_end(status):
            result = train(recipe, options, rank)
    except ShutdownRequested as left:
        if rank == 0:
            get_logger(f"learner[{rank}]").info("%s", left)
        return 130
    except (ValueError, TimeoutError) as error:
        logging.getLogger("pronk").debug("", exc_info=True)
        return fail_once(error, rank)
    except Stopped as stopped:
        get_logger(f"learner[{rank}]").info("%s: stopping", stopped)
        return 130
    if result is not None:
        print(json.dumps(result), flush=True)
    return 0


def prepare(recipe: Recipe, rank: int) -> tuple[Recipe, StatusFile | None, TextIO | None]:
    """Return the recipe to run and, on rank 0, the run's status and the lock on its folder. Raise ValueError for a
    mistake that can be found before anything heavy starts."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and recipe.learner.resume == "never":  # after a restart by torchrun, continue the run
        recipe = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"resume": "auto"})})
    if rank:
        return recipe, None, None
    check_cheaply(recipe)
    lock = take_run_folder(recipe)
    check_address(recipe.learner.bind)
    lock = prepare_run_folder(recipe, lock, restarted=restarted)
    status = StatusFile(Path(recipe.run.dir) / recipe.run.name)
    status.enter("loading the model")
    return recipe, status, lock


def train(recipe: Recipe, options: argparse.Namespace, rank: int) -> dict[str, Any] | None:
    """Train with actors, or on the groups of a recording; return the result on rank 0, None on other ranks."""
    recording = options.from_recording
    shutdown = heed_signals(recipe)
    _gpu = claim_gpu(recipe, rank)
    if recording:
        from learner.offline import run_recorded

        metrics = run_recorded(recipe, Path(recording), shutdown, shuffled=options.shuffle)
        if rank:
            return None
        folder = Path(recipe.run.dir) / recipe.run.name
        words = "%d steps on the groups of %s: metrics and checkpoints are in %s"
        get_logger("learner").info(words, recipe.learner.total_steps, recording, folder)
        return metrics
    with kept_for_ever():
        from learner.learner_loop import run  # imports torch and transformers, so after the cheap checks

    samples = (training_samples(recipe), held_out_samples(recipe)) if rank == 0 else (SeedSource(), [])
    result = run(recipe, *samples, shutdown)
    return None if result is None else result.as_dict()


@contextmanager
def recorded_end(status: StatusFile | None) -> Iterator[None]:
    """Record how the body ends, if there is a status to record it in: on rank 0."""
    how, reason = "complete", ""
    try:
        yield
    except (ShutdownRequested, Stopped) as left:
        how, reason = "stopped", str(left)
        raise
    except BaseException as error:
        user_error = isinstance(error, (ValueError, TimeoutError))
        how, reason = "failed", str(error) if user_error else describe(error)
        raise
    finally:
        if status is not None:
            status.end(how, reason)


def start_ranks(options: argparse.Namespace) -> int:
    """Become the torchrun that starts the ranks of this host, which says in one line how a rank ended; return an exit
    code if that is impossible."""
    if options.ranks < 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return fail(ConfigError(f"--ranks {options.ranks}: at least 1, and not under torchrun"))
    recording = ["--from-recording", options.from_recording] if options.from_recording else []
    recording += ["--shuffle"] if options.shuffle else []
    arguments = ["--config", options.config, *recording, *options.overrides]
    starter = [sys.executable, str(ROOT / "launch/processes/torchrun.py"), "--standalone"]
    os.environ["PYTHONPATH"] = module_path()
    os.execv(sys.executable, [*starter, f"--nproc-per-node={options.ranks}", str(Path(__file__)), *arguments])


def check_cheaply(recipe: Recipe) -> None:
    """Raise ValueError for mistakes that can be found before an existing run is moved aside: keys, writers, data,
    resume."""
    learner_keys(recipe.transport, recipe.learner.bind)
    read_api_key(recipe.engine.api_key_file)
    check_writers(recipe)
    check_data(recipe)
    check_teacher(recipe)
    check_resume(recipe.learner.resume)


def heed_signals(recipe: Recipe) -> Shutdown:
    """Return what makes the learner leave in order after a signal. From here on the process ends in time even if the
    exception that a signal raises is lost, for example in a finalizer."""
    shutdown = Shutdown(recipe.learner.leave_timeout_s)
    shutdown.guard()
    return shutdown


def fail_once(error: Exception, rank: int) -> int:
    """Print a mistake as `fail` does. If all ranks have the same mistake, only the first prints it: the others wait,
    and torchrun ends them meanwhile."""
    try:
        time.sleep(OTHERS_WAIT_S if rank else 0.0)
    except Stopped:
        return EXIT_USER_ERROR
    return fail(error)


def claim_gpu(recipe: Recipe, rank: int) -> list[TextIO]:
    """Lock this rank's GPU until the process ends. Raise ConfigError if another process of Pronk has it."""
    if recipe.learner.device != "cuda":
        return []
    gpu = gpu_names([int(os.environ.get("LOCAL_RANK", "0"))], os.environ)
    return lock_gpus(gpu, f"learner rank {rank}", "learner" if recipe.engine.shares_gpu else "")


if __name__ == "__main__":
    run_program(main)
