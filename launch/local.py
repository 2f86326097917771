"""Learner, engine and actors on this machine, with a live table of how far they are (lines where there is no terminal):

    python launch/local.py --config launch/recipes/sokoban_tiny.toml [--ranks N] [--section.key VALUE ...]

At the end it draws the run's curves into its folder. The last line is one JSON object: the run's result.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import json
import os
import subprocess
from contextlib import nullcontext, suppress
from random import Random
from typing import Any

from actor.loop import EXIT_NO_LEARNER
from envs.loader import load_env, load_module
from launch.engines.commands import check_alone, check_host
from launch.processes.children import ROOT, Child, Stopped, cpu_env, raise_on_signals, start, stop_all, wait_for_any
from launch.processes.run_folder import check_run_folder
from launch.processes.run_logs import RunLogs
from launch.task_samples import cannot_play, check_data, held_out_samples, ready
from launch.terminal.progress import Progress
from launch.terminal.screen import Screen, is_terminal
from launch.terminal.state import RunState
from learner.checkpoints.folder import check_resume
from shared.config import ConfigError, Recipe, fail, parse, recipe_parser
from shared.log import get_logger

LOG = get_logger("local")
LEARNER_LEAVES_S = 60.0  # longest between the end of its actors and its own
SAVE_S = 1800.0  # longest between SIGTERM and its end; it ends itself where no checkpoint makes progress


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the learner")
    recipe, options = parse(parser, argv)
    try:
        if options.ranks < 1:
            raise ConfigError(f"--ranks {options.ranks}: at least 1")
        recipe = ready(recipe)
        check_alone(recipe)
        check_host(recipe, options.ranks)
        check_meeting(recipe)
        check_resume(recipe.learner.resume)
        check_data(recipe)
        check_run_folder(recipe)
        show_random_policy(recipe)
    except ValueError as error:
        return fail(error)
    raise_on_signals()
    folder = Path(recipe.run.dir) / recipe.run.name
    result = Result(folder / "result.json")
    with Screen() if is_terminal() else nullcontext() as screen:
        progress = Progress(recipe, screen)
        code = run(recipe, options, progress, result)
    if code == 0:
        curve = curve_of(folder)
        said = json.loads(result.path.read_text())
        say_the_end(said, progress.state)
        print(json.dumps(said | {"curve": curve}), flush=True)
    return code


class Result:
    """A run's result.json. One that stands there already is an earlier process's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = self._written()

    @property
    def is_new(self) -> bool:
        return self._written() not in (None, self._before)

    def _written(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def check_meeting(recipe: Recipe) -> None:
    """ConfigError unless actors look for the learner at the port where it waits: both are on this machine."""
    bind, sought = recipe.learner.bind, recipe.actor.learner
    if bind.rpartition(":")[2] != sought.rpartition(":")[2]:
        raise ConfigError(
            f"learner.bind = {bind!r}, but actor.learner = {sought!r}: give both the same port "
            f"(--learner.bind ADDRESS --actor.learner ADDRESS)"
        )


def run(recipe: Recipe, options: argparse.Namespace, progress: Progress, result: Result) -> int:
    """Learner and actors, until they have ended; the exit code. What they say is kept in the run's folder too."""
    arguments = ["--config", options.config, *options.overrides]
    learner, env = [*starter(options.ranks), script("learner"), *arguments], cpu_env(recipe.learner.threads)
    children: list[Child] = []
    with RunLogs(result.path.parent) as logs:
        try:
            with logs.stderr("learner") as stderr:
                children.append(start("learner", learner, env=env, mute=True, stderr=stderr, leave_s=SAVE_S))
            with logs.stderr("actors") as stderr:
                children.append(start("actors", [sys.executable, script("actors"), *arguments], stderr=stderr))
            return watch(children, progress, result)
        except Stopped as signal:
            LOG.info("%s: stopping", signal)
            return 130
        finally:
            stop_all(children)


def starter(ranks: int) -> list[str]:
    """What starts the learner's ranks. One alone needs no torchrun, whose own import of torch takes seconds."""
    if ranks == 1:
        return [sys.executable, "-u"]
    return [sys.executable, script("processes/torchrun"), "--standalone", f"--nproc-per-node={ranks}"]


def script(name: str) -> str:
    return str(ROOT / "launch" / f"{name}.py")


def watch(children: list[Child], progress: Progress, result: Result) -> int:
    """Until the learner has ended; the exit code is its own, or that of what failed first."""
    ended = wait_for_any(children, progress.show)
    progress.show(final=True)
    if ended.name == "actors" and ended.process.returncode in (0, EXIT_NO_LEARNER):  # they heard of the end first
        with suppress(subprocess.TimeoutExpired):
            children[0].process.wait(LEARNER_LEAVES_S)
            ended = children[0]
    code = ended.process.returncode
    if code == 0 and not result.is_new:
        code = 1
    if code:
        LOG.error("%s ended with exit code %d; its reason is above", ended.name, code)
    return code


def curve_of(folder: Path) -> str | None:
    """The picture of the run's curves; None, and one line that says why, where it could not be drawn."""
    path = folder / "curve.png"
    try:
        from launch.plots.figure import Curve, draw  # here, so that a run starts without matplotlib
        from launch.plots.series import read_run

        run = read_run(folder)
        draw([Curve(run.name, (run,))], path, axis="minutes", title=run.name)
    except Exception as error:  # noqa: BLE001 - whatever a drawing fails of, the run has ended well
        LOG.warning("no curve was drawn: %s: %s", type(error).__name__, " ".join(str(error).split()))
        return None
    LOG.info("the run's curves: %s", path)
    return str(path)


def say_the_end(result: dict[str, Any], state: RunState) -> None:
    """What was reached, and what is wrong."""
    steps = f"{result['optimizer_steps']} steps, {result['episodes']} episodes in {result['minutes']:.1f} minutes"
    before, after = result.get("success_before"), result.get("success_after")
    held_out = f"success on held-out samples {before:.3f} -> {after:.3f}; " if None not in (before, after) else ""
    LOG.info("%s%s; alarms: %s", held_out, steps, ", ".join(state.alarms) or "none")


def show_random_policy(recipe: Recipe) -> None:
    """Logs the success of a policy that knows only the format, where the environment has one (`random_response`).
    ValueError, in one line, for held-out samples that are not there or cannot be played."""
    respond = getattr(load_module(recipe.env.module), "random_response", None)
    samples = held_out_samples(recipe)
    if respond is None or not samples:
        return
    build_env, rng, successes = load_env(recipe.env.module), Random(0), 0
    for sample in samples:
        try:
            env, done = build_env(sample=sample, args=recipe.env.build_args), False
            env.reset()
            for _ in range(recipe.env.max_turns):
                if not done:
                    _, done, _ = env.step(respond(rng))
            successes += bool(env.success)
            env.close()
        except Exception as error:
            raise cannot_play(recipe, sample, error) from error
    LOG.info("a random policy succeeds on %.3f of %d held-out samples", successes / len(samples), len(samples))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
