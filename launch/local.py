"""Learner, engine and actors on this machine, with one progress line:

    python launch/local.py --config launch/recipes/sokoban_tiny.toml [--ranks N] [--section.key VALUE ...]

At the end it draws the run's curves into its folder. The last line is one JSON object: the run's result.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import os
import time
from dataclasses import dataclass, field
from random import Random
from typing import TextIO

from envs.loader import load_env, load_module
from launch.engines.commands import check_host
from launch.processes.children import ROOT, Child, Stopped, cpu_env, raise_on_signals, start, stop_all, wait_for_any
from launch.task_samples import held_out_samples, ready
from shared.config import Recipe, fail, parse, recipe_parser
from shared.log import get_logger

LOG = get_logger("local")


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the learner")
    recipe, options = parse(parser, argv)
    try:
        recipe = ready(recipe)
        check_host(recipe, options.ranks)
    except ValueError as error:
        return fail(error)
    show_random_policy(recipe)
    raise_on_signals()
    children: list[Child] = []
    LOG.info("watch the run: python launch/dashboard.py %s", recipe.run.dir)
    folder = Path(recipe.run.dir) / recipe.run.name
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    try:
        arguments = ["--config", options.config, *options.overrides]
        torchrun = [sys.executable, script("processes/torchrun"), "--standalone", f"--nproc-per-node={options.ranks}"]
        progress = Progress(folder / "metrics.jsonl", recipe)
        children.append(
            start("learner", [*torchrun, script("learner"), *arguments], env=cpu_env(recipe.learner.threads), mute=True)
        )
        children.append(start("actors", [sys.executable, script("actors"), *arguments]))
        code = watch(children, progress, result)
    except Stopped as signal:
        LOG.info("%s: stopping", signal)
        return 130
    finally:
        stop_all(children)
    if code == 0:
        print(json.dumps(json.loads(result.read_text()) | {"curve": curve_of(folder)}), flush=True)
    return code


def script(name: str) -> str:
    return str(ROOT / "launch" / f"{name}.py")


def watch(children: list[Child], progress: Progress, result: Path) -> int:
    """Until the learner has ended; the exit code is its own, or that of what failed first."""
    ended = wait_for_any(children, progress.show)
    progress.show(final=True)
    if ended.name == "actors" and ended.process.returncode == 0:  # they heard of the end first
        children[0].process.wait(60)
        ended = children[0]
    code = ended.process.returncode
    if code == 0 and not result.exists():
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


@dataclass
class Progress:
    """Follows metrics.jsonl and keeps one line of it on the terminal; one line every 30 s where there is none."""

    path: Path
    recipe: Recipe
    _file: TextIO | None = None
    _skip: int = 0  # bytes that an earlier run wrote
    _aside: int = 0  # inode of an earlier run's file, which the learner moves aside
    _line: str = ""
    _shown: float = 0.0
    _rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists() and self.recipe.learner.resume != "never":
            self._skip = self.path.stat().st_size
        elif self.path.exists():
            self._aside = self.path.stat().st_ino

    def show(self, *, final: bool = False) -> None:
        if self._file is None and self.path.exists() and self.path.stat().st_ino != self._aside:
            self._file = self.path.open(encoding="utf-8")
            self._file.seek(self._skip if self.path.stat().st_size >= self._skip else 0)
        fresh = False
        for part in self._file or ():
            self._line += part
            if not self._line.endswith("\n"):  # the learner is still writing it
                break
            row, self._line = json.loads(self._line), ""
            if "rollout/reward" in row:
                self._rows.append(row)
                fresh = True
        terminal = sys.stderr.isatty()
        if self._rows and ((fresh and terminal) or final or (fresh and time.monotonic() - self._shown > 30)):
            self._shown = time.monotonic()
            end = "\n" if final or not terminal else ""
            print(("\r\033[K" if terminal else "") + self.line(), end=end, file=sys.stderr, flush=True)

    def line(self) -> str:
        """Means over the last ten steps."""
        row, recent = self._rows[-1], self._rows[-10:]

        def mean(key: str) -> float:
            values = [r[key] for r in recent if r.get(key) is not None]
            return sum(values) / max(1, len(values))

        steps, total = int(row["step"]), self.recipe.learner.total_steps
        left = (total - steps) * mean("time/step_s") / 60
        return (
            f"step {steps}/{total}  success {mean('rollout/success'):.2f}  reward {mean('rollout/reward'):.2f}  "
            f"version {row['policy_version']:.0f}  staleness {mean('staleness/token/mean'):.1f} "
            f"(max {max(r.get('staleness/token/max') or 0 for r in recent):.0f})  "
            f"{mean('speed/turns_per_s'):.0f} turns/s  learner idle {100 * mean('learner/idle_frac'):.0f} %  "
            f"actor idle {100 * mean('actors/idle_frac'):.0f} %  {row['progress/minutes']:.1f} min, {left:.1f} left"
        )


def show_random_policy(recipe: Recipe) -> None:
    """Logs the success of a policy that knows only the format, where the environment has one (`random_response`)."""
    respond = getattr(load_module(recipe.env.module), "random_response", None)
    samples = held_out_samples(recipe)
    if respond is None or not samples:
        return
    build_env, rng, successes = load_env(recipe.env.module), Random(0), 0
    for sample in samples:
        env, done = build_env(sample=sample, args=recipe.env.args), False
        env.reset()
        for _ in range(recipe.env.max_turns):
            if not done:
                _, done, _ = env.step(respond(rng))
        successes += bool(env.success)
        env.close()
    LOG.info("a random policy succeeds on %.3f of %d held-out samples", successes / len(samples), len(samples))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
