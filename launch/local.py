"""Learner, engine and actors on this machine, with a live table of how far they are (lines where there is no terminal):

    python launch/local.py --config launch/recipes/sokoban_tiny.toml [--ranks N] [--section.key VALUE ...]

At the end it draws the run's curves into its folder. The result is in its result.json, and, where stdout is no
terminal, also the last line.
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
import os
import subprocess
from contextlib import nullcontext, suppress
from random import Random
from typing import Any

from actor.actor_loop import EXIT_NO_LEARNER
from envs.base import flat_metrics
from envs.env_calls import close_env, make_env, reset_env, responder, step_env
from envs.loader import load_env, load_module
from launch.engines.host_engines import check_alone, check_host
from launch.processes.children import (
    ROOT,
    Child,
    Stopped,
    cpu_env,
    run_program,
    start,
    stop_all,
    wait_for_any,
)
from launch.processes.restarts import how_it_ended
from launch.processes.run_folder import check_run_folder
from launch.processes.run_logs import RunLogs
from launch.task_samples import cannot_play, check_data, ready, samples_of
from launch.teachers import check_teacher
from launch.terminal.progress import RunProgress
from launch.terminal.run_state import RunState
from launch.terminal.screen import Screen, is_terminal
from learner.checkpoints.checkpoint_folder import check_resume, list_checkpoints
from shared.config.recipe import ConfigError, Recipe, fail, parse, recipe_parser
from shared.config.tasks import held_out_sets
from shared.keys import judge_key
from shared.log import get_logger
from shared.types import Sample

LOG = get_logger("local")
LEARNER_LEAVES_S = 60.0  # limit from the end of its actors to its own
SAVE_S = 1800.0  # limit from SIGTERM to its end; it ends itself earlier if a checkpoint makes no progress


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the learner")
    recipe, options = parse(parser, argv)
    try:
        if options.ranks < 1:
            raise ConfigError(f"--ranks {options.ranks}: at least 1")
        recipe = ready(recipe)
        judge_key(recipe.reward.judge)  # raises now if it cannot be read
        check_alone(recipe)
        check_host(recipe, options.ranks)
        check_meeting(recipe)
        check_resume(recipe.learner.resume)
        check_data(recipe)
        check_teacher(recipe)
        check_run_folder(recipe)
        show_random_policy(recipe)
    except ValueError as error:
        return fail(error)
    folder = Path(recipe.run.dir) / recipe.run.name
    result = Result(folder / "result.json")
    with Screen() if is_terminal() else nullcontext() as screen:
        progress = RunProgress(recipe, screen)
        code = run(recipe, options, progress, result)
    if code == 0:
        curve = curve_of(folder)
        summary = json.loads(result.path.read_text())
        say_the_end(summary, progress.state)
        if not sys.stdout.isatty():  # for programs; a person reads the lines above, and result.json
            print(json.dumps(summary | {"curve": curve}), flush=True)
    return code


class Result:
    """A run's result.json. A file that already exists belongs to an earlier process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = self._written()

    @property
    def is_new(self) -> bool:
        return self._written() not in (None, self._before)

    def _written(self) -> tuple[int, int] | None:
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns


def check_meeting(recipe: Recipe) -> None:
    """Raise ConfigError unless learner and actors, both on this machine, use the same port."""
    bind, sought = recipe.learner.bind, recipe.actor.learner
    if bind.rpartition(":")[2] != sought.rpartition(":")[2]:
        raise ConfigError(
            f"learner.bind = {bind!r}, but actor.learner = {sought!r}: give both the same port "
            f"(--learner.bind ADDRESS --actor.learner ADDRESS)"
        )


def run(recipe: Recipe, options: argparse.Namespace, progress: RunProgress, result: Result) -> int:
    """Run learner and actors until they have ended; return the exit code. Their stderr is also written to logs in the
    run's folder."""
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
        except Stopped as stopped:
            LOG.info("%s: stopping", stopped)
            return 130
        finally:
            stop_all(children)


def starter(ranks: int) -> list[str]:
    """Return the command that starts the learner's ranks. A single rank needs no torchrun, whose own import of torch
    takes seconds."""
    if ranks == 1:
        return [sys.executable, "-u"]
    return [sys.executable, script("processes/torchrun"), "--standalone", f"--nproc-per-node={ranks}"]


def script(name: str) -> str:
    return str(ROOT / "launch" / f"{name}.py")


def watch(children: list[Child], progress: RunProgress, result: Result) -> int:
    """Wait until the learner has ended; return its exit code, or that of the process that failed first."""
    ended = wait_for_any(children, progress.show)
    progress.show(final=True)
    # The actors learned of the end first.
    if ended.name == "actors" and ended.process.returncode in (0, EXIT_NO_LEARNER):
        with suppress(subprocess.TimeoutExpired):
            children[0].process.wait(LEARNER_LEAVES_S)
            ended = children[0]
    code = ended.process.returncode
    if code == 0 and not result.is_new:
        code = 1
    if code:
        LOG.error("%s", failure(ended, result.path.parent))
    return 128 - code if code < 0 else code


def failure(ended: Child, folder: Path) -> str:
    """Return how a process has failed, and how the run goes on if the process could not say so itself."""
    if ended.process.returncode >= 0:
        return f"{ended.name} {how_it_ended(ended)}; its reason is above"
    kept = [path.name for path in list_checkpoints(folder / "checkpoints")]
    killed = ended.process.returncode == -signal.SIGKILL
    memory = ", as the system does when memory runs out (dmesg tells)" if killed else ""
    cure = f"the same command with --learner.resume auto goes on from {kept[-1]}" if kept else "there is no checkpoint"
    return f"{ended.name} {how_it_ended(ended)}{memory}; {cure}"


def curve_of(folder: Path) -> str | None:
    """Draw the run's curves and return the picture's path; log the reason and return None if that fails."""
    path = folder / "curve.png"
    try:
        from launch.plots.curve_data import read_run
        from launch.plots.figure import Curve, draw  # late, so that a run starts without matplotlib

        run = read_run(folder)
        draw([Curve(run.name, (run,))], path, axis="minutes", title=run.name)
    except Exception as error:  # noqa: BLE001 - the run has succeeded, whatever fails in drawing
        LOG.warning("no curve was drawn: %s: %s", type(error).__name__, " ".join(str(error).split()))
        return None
    LOG.info("the run's curves: %s", path)
    return str(path)


def say_the_end(result: dict[str, Any], state: RunState) -> None:
    """Log the run's result and its alarms."""
    steps = f"{result['optimizer_steps']} steps, {result['episodes']} episodes in {result['minutes']:.1f} minutes"
    before, after = result.get("success_before"), result.get("success_after")
    held_out = f"success on held-out samples {before:.3f} -> {after:.3f}; " if None not in (before, after) else ""
    LOG.info("%s%s; alarms: %s", held_out, steps, ", ".join(state.alarms) or "none")


def show_random_policy(recipe: Recipe) -> None:
    """Log the success, on each held-out set, of a policy that knows only the format, if the environment has one
    (`random_response`). Raise ValueError, in one line, for held-out samples that are missing or cannot be played."""
    for held_out in held_out_sets(recipe):
        task, rng = held_out.task, Random(0)
        successes: list[bool] = []
        with task.named():
            samples = [] if task.recipe.rollout.function else samples_of(held_out)  # the learner reads them too
            for sample in samples:
                if (success := succeeds_at_random(task.recipe, sample, rng)) is None:
                    break
                successes.append(success)
        if successes:
            of = f" of {held_out.name}" if held_out.name else ""
            share = sum(successes) / len(successes)
            LOG.info("a random policy succeeds on %.3f of %d held-out samples%s", share, len(successes), of)


def succeeds_at_random(recipe: Recipe, sample: Sample, rng: Random) -> bool | None:
    """Tell whether such a policy succeeds; None if the environment has none."""
    module, build_env = load_module(recipe.env.module), load_env(recipe.env.module)
    try:
        env, done = make_env(build_env, sample=sample, args=recipe.env.build_args), False
        if (respond := responder(module, env)) is None:
            close_env(env)
            return None
        _, info = reset_env(env)
        for _ in range(recipe.env.max_turns):
            if not done:
                _, done, info = step_env(env, respond(rng))
        success = flat_metrics(info.get("metrics") or {}).get("success", 0.0) > 0
        close_env(env)
    except Exception as error:
        raise cannot_play(recipe, sample, error) from error
    return success


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_program(main)
