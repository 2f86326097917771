"""Compares settings of one recipe, each trained for the same time on several seeds, one run after another:

    python -m tests.bench.compare objectives --minutes 6 --seeds 3 --out runs/compare
    python -m tests.bench.compare staleness uncorrected --only "max_staleness 8" --seeds 1

The sets and their labels are in tests/bench/compare.toml; what is in none of them is the recipe's, but for a constant
learning rate, steps without end and checkpoints at the end alone, where a set does not name these itself.
OUT/SET has a run's folder, its output and, once it has ended, its outcome; runs with an outcome are not
repeated unless their fields have changed. OUT/SET.md is the table, OUT/SET-minutes.png and OUT/SET-episodes.png the
pictures. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actor.isolation.lifeline import tied_to_this_process
from launch.engines.network import free_port
from launch.plots.curve_data import Points, RunCurves, read_run, smoothed
from launch.plots.figure import Curve, draw
from shared.config.recipe import ConfigError, fail, load_recipe

SETS = Path(__file__).with_suffix(".toml")
WINDOW = 10  # steps over which success is averaged
SLACK_S = 1800.0  # beyond its minutes: the start, the evaluations, the end


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `folder` is its own; its output and its outcome lie beside it."""

    label: str
    seed: int
    folder: Path
    fields: dict[str, Any]

    @property
    def outcome(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.outcome.json")

    @property
    def done(self) -> bool:
        """Whether it has run with these fields."""
        return self.outcome.exists() and json.loads(self.outcome.read_text())["fields"] == self.fields


def plans_of(name: str, options: argparse.Namespace) -> list[Plan]:
    """The runs of a set, all labels of a seed before the next seed. ValueError: an unknown set, label or field."""
    sets = tomllib.loads(options.sets.read_text(encoding="utf-8"))
    if name not in sets:
        raise ValueError(f"{options.sets} has no set {name!r}; it has {', '.join(sets)}")
    common = {"learner.total_steps": 10**6, "learner.optimizer.schedule": "constant", "learner.checkpoint.every": 0}
    common |= sets[name].pop("all", {}) | {"learner.max_minutes": options.minutes, "learner.resume": "never"}
    common |= {"eval.samples": options.samples, "eval.before": False}  # the clock is training's alone
    if unknown := set(options.only) - set(sets[name]):
        raise ValueError(f"set {name!r} has no {', '.join(sorted(unknown))}; it has {', '.join(sets[name])}")
    labels = {label: fields for label, fields in sets[name].items() if not options.only or label in options.only}
    plans = []
    for seed in range(options.seeds):
        for label, fields in labels.items():
            folder = options.out.absolute() / name / f"{re.sub(r'[^a-z0-9]+', '_', label.lower())}-{seed}"
            plans.append(Plan(label, seed, folder, common | fields | {"run.seed": seed}))
            load_recipe(options.recipe, arguments_of(plans[-1].fields))
    return plans


def arguments_of(fields: dict[str, Any]) -> list[str]:
    """As the command line has them."""
    said = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in fields.items()}
    return [part for key, value in said.items() for part in (f"--{key}", value)]


def play(plan: Plan, recipe: str) -> dict[str, Any]:
    """Trains; the run's result, or why it ended before it had one."""
    address = f"tcp://127.0.0.1:{free_port()}"
    places = {"run.dir": plan.folder.parent, "run.name": plan.folder.name, "engine.port": free_port()}
    places |= {"learner.bind": address, "actor.learner": address}
    command = [sys.executable, "launch/local.py", "--config", recipe, *arguments_of(plan.fields | places)]
    limit_s = 60 * plan.fields["learner.max_minutes"] + SLACK_S
    with plan.folder.with_name(f"{plan.folder.name}.log").open("w+", encoding="utf-8") as log:
        try:
            kept: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
            done = subprocess.run(command, cwd=ROOT, timeout=limit_s, preexec_fn=tied_to_this_process(), **kept)
        except subprocess.TimeoutExpired:
            return {"stopped": f"not over after {limit_s:.0f} s"}
        if done.returncode == 0:
            return {"result": json.loads(done.stdout.splitlines()[-1])}
        log.seek(0)
        said = [line for line in log.read().splitlines() if "error" in line.lower()] or ["no reason was given"]
    return {"stopped": f"exit code {done.returncode}: {said[-1][-300:]}"}


def play_all(plans: Sequence[Plan], run: Callable[[Plan], dict[str, Any]]) -> None:
    """Those that are not done, one after another; each outcome is written when its run has ended."""
    for number, plan in enumerate(plans, 1):
        if plan.done:
            continue
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        plan.outcome.unlink(missing_ok=True)
        outcome = run(plan)
        plan.outcome.write_text(json.dumps({"fields": plan.fields, **outcome}, indent=1) + "\n")
        after = (outcome.get("result") or {}).get("success_after", outcome.get("stopped"))
        print(f"{number}/{len(plans)} {plan.label}, seed {plan.seed}: {after}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ what the runs amount to


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: success in training by minutes and by episodes, and where it first reached a height (None: never)."""

    result: dict[str, Any]  # empty where the run was stopped
    at_minutes: list[float]
    at_episodes: list[float]
    minutes_to: float | None
    episodes_to: float | None
    minutes: float
    steps: int
    lag: float


def measured(
    run: RunCurves, result: dict[str, Any], minutes: Sequence[float], episodes: Sequence[float], height: float
) -> Measured:
    by_minutes, by_episodes = (run.series("rollout/success", axis) for axis in ("minutes", "episodes"))
    return Measured(
        result=result,
        at_minutes=at(by_minutes, minutes),
        at_episodes=at(by_episodes, episodes),
        minutes_to=first_at(by_minutes, height),
        episodes_to=first_at(by_episodes, height),
        minutes=float(by_minutes.x[-1]),
        steps=len(run.steps),
        lag=float(run.series("staleness/token/mean", "steps").y.mean()),
    )


def at(success: Points, places: Sequence[float]) -> list[float]:
    """The smoothed value at each place; a run that was stopped keeps its last one."""
    smooth = smoothed(success, WINDOW)
    return [float(np.interp(place, smooth.x, smooth.y)) for place in places]


def first_at(success: Points, height: float) -> float | None:
    """Where the mean of the last WINDOW steps first was at least `height`."""
    if len(success.y) < WINDOW:
        return None
    means = np.convolve(success.y, np.full(WINDOW, 1 / WINDOW), "valid")
    found = np.flatnonzero(means >= height)
    return float(success.x[found[0] + WINDOW - 1]) if len(found) else None


def runs_of(plans: Sequence[Plan]) -> Iterator[tuple[str, list[tuple[RunCurves, dict[str, Any]]]]]:
    """By label, the runs that have made a step, with their results."""
    for label in dict.fromkeys(plan.label for plan in plans):
        found = []
        for plan in plans:
            if plan.label == label and plan.done and (plan.folder / "metrics.jsonl").exists():
                found.append((read_run(plan.folder), json.loads(plan.outcome.read_text()).get("result") or {}))
        if found:
            yield label, found


def places_of(runs: Sequence[RunCurves], axis: str) -> list[float]:
    """A quarter, a half and all of the way that the median run went, in two digits."""
    end = float(np.median([run.series("rollout/success", axis).x[-1] for run in runs]))
    return [float(f"{share * end:.2g}") for share in (0.25, 0.5, 1.0)]


def table(found: dict[str, list[Measured]], minutes: Sequence[float], episodes: Sequence[float], height: float) -> str:
    """A row for each label: means over seeds, and lowest to highest."""
    heads = ["", "runs", "held out, sampled", "greedy", *(f"{m:g} min" for m in minutes)]
    heads += [*(f"{e / 1000:g}k episodes" for e in episodes), f"minutes to {height:g}", f"episodes to {height:g}"]
    rows = [[*heads, "steps", "lag"], ["---"] * (len(heads) + 2)]
    for label, runs in found.items():
        row = [label, f"{len(runs)}" + (f", {stopped} stopped" if (stopped := sum(not r.result for r in runs)) else "")]
        row += [ranged([r.result.get(key) for r in runs]) for key in ("success_after", "greedy_success_after")]
        row += [ranged([r.at_minutes[i] for r in runs]) for i in range(len(minutes))]
        row += [ranged([r.at_episodes[i] for r in runs]) for i in range(len(episodes))]
        row += [reached([r.minutes_to for r in runs], "{:.1f}"), reached([r.episodes_to for r in runs], "{:.0f}")]
        rows.append([*row, f"{mean(r.steps for r in runs):.0f}", f"{mean(r.lag for r in runs):.1f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ranged(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):.3f} ({min(known):.2f} to {max(known):.2f})" if known else ""


def reached(values: Sequence[float | None], how: str) -> str:
    """The mean over the seeds that came there, and how many they are where some did not."""
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    said = f"{how.format(mean(known))} ({', '.join(map(how.format, known))})"
    return said if len(known) == len(values) else f"{said}, {len(known)} of {len(values)}"


def report(name: str, plans: Sequence[Plan], options: argparse.Namespace) -> dict[str, Any]:
    """Writes table and pictures of a set; the same figures as JSON values."""
    by_label = dict(runs_of(plans))
    runs = [run for found in by_label.values() for run, _ in found]
    if not runs:
        return {}
    minutes, episodes = places_of(runs, "minutes"), places_of(runs, "episodes")
    found = {
        label: [measured(run, result, minutes, episodes, options.height) for run, result in pairs]
        for label, pairs in by_label.items()
    }
    text = table(found, minutes, episodes, options.height)
    (options.out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    curves = [Curve(label, tuple(run for run, _ in pairs)) for label, pairs in by_label.items()]
    for axis in ("minutes", "episodes"):
        how = {"metrics": ("success", "entropy", "gap"), "axis": axis, "window": WINDOW, "title": name}
        draw(curves, options.out / f"{name}-{axis}.png", **how)
    return {label: summary(runs) for label, runs in found.items()}


def summary(runs: Sequence[Measured]) -> dict[str, Any]:
    return {
        "success_after": [r.result.get("success_after") for r in runs],
        "greedy_success_after": [r.result.get("greedy_success_after") for r in runs],
        "minutes_to": [r.minutes_to for r in runs],
        "episodes_to": [r.episodes_to for r in runs],
        "seconds_a_step": [round(60 * r.minutes / r.steps, 3) for r in runs],
        "steps": [r.steps for r in runs],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="SET", help="of the sets of --sets")
    parser.add_argument("--sets", type=Path, default=SETS, help="TOML file of sets and labels")
    parser.add_argument("--only", nargs="+", default=[], metavar="LABEL", help="these alone")
    parser.add_argument("--recipe", default="launch/recipes/sokoban_tiny.toml")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, for each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=500, help="held-out samples")
    parser.add_argument("--height", type=float, default=0.9, help="success whose first time is told")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument(
        "--report", action="store_true", help="no run: table and pictures of the runs of these very options"
    )
    options = parser.parse_args(argv)
    try:
        sets = {name: plans_of(name, options) for name in options.names}
    except (ConfigError, ValueError, OSError) as error:
        return fail(error)
    found = {}
    for name, plans in sets.items():
        if not options.report:
            play_all(plans, lambda plan: play(plan, str(Path(options.recipe).absolute())))
        found[name] = report(name, plans, options)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
