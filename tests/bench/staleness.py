"""Success against staleness: the whole system trained at several bounds, with and without importance correction.

    python -m tests.bench.staleness [--tasks colour sokoban] [--bounds 0 1 4 8] [--seeds 3] [--rows FILE] [--draw DIR]

Every run has the same number of optimizer steps and starts from the same small model. As many groups are in play as the
bound lets be issued, so that the policy does run ahead of its data. Each run appends one line to FILE; runs that it
holds already are not repeated. `--draw` writes the plot. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.engines.network import free_port

CORRECTIONS = {"importance": "V-trace", "none": "no correction"}
LAST = 10  # steps over which the success in training is averaged


@dataclass(frozen=True, slots=True)
class Task:
    """What is changed of a recipe, the same for every run of the task."""

    recipe: str
    groups_per_step: int
    steps: int
    learner: dict[str, Any]  # fields of the learner


COMMON = {"objective.name": "vtrace", "optimizer.schedule": "linear"}
TASKS = {
    "colour": Task(
        "colour_tiny", 16, 100, {"optimizer.lr": 5e-4, "optimizer.value_lr": 3e-3, "optimizer.warmup_steps": 16}
    ),
    "sokoban": Task("sokoban_tiny", 32, 48, {"optimizer.lr": 4e-4, "optimizer.warmup_steps": 8}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Success on the same held-out samples before and after, and in training over the last steps."""

    task: str
    bound: int
    correction: str
    seed: int
    before: float
    after: float
    in_training: float
    lag: float  # versions between a token's sampling and its training, in the mean of all steps
    max_lag: float
    steps: int
    seconds: float

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.task, self.bound, self.correction, self.seed


def play(name: str, bound: int, correction: str, seed: int, samples: int) -> Row:
    task = TASKS[name]
    address = f"tcp://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        learner = {
            "bind": address, "total_steps": task.steps, "max_staleness": bound, "checkpoint.every": 0,
            "groups_per_step": task.groups_per_step, "objective.correction": correction, "publish.verify_every": 0,
        } | COMMON | task.learner  # fmt: skip
        fields = {f"learner.{name}": value for name, value in learner.items()} | {
            "run.dir": folder, "run.name": "run", "run.seed": seed, "actor.learner": address,
            "actor.groups": task.groups_per_step * (bound + 1), "engine.port": free_port(), "engine.max_batch": 64,
            "eval.samples": samples, "eval.greedy": "false",
        }  # fmt: skip
        arguments = [part for key, value in fields.items() for part in (f"--{key}", str(value))]
        command = [sys.executable, "launch/local.py", "--config", f"launch/recipes/{task.recipe}.toml", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/reward" in row]
    lags = [row["staleness/token/mean"] for row in steps]
    return Row(
        task=name, bound=bound, correction=correction, seed=seed,
        before=result["success_before"], after=result["success_after"],
        in_training=statistics.mean(row["rollout/success"] for row in steps[-LAST:]),
        lag=statistics.mean(lags), max_lag=max(row["staleness/token/max"] for row in steps),
        steps=len(steps), seconds=60 * steps[-1]["progress/minutes"],
    )  # fmt: skip


def summary(rows: list[Row]) -> Iterator[tuple[str, int, str, list[Row]]]:
    """Rows of one setting together, seeds side by side."""
    for task in TASKS:
        for correction in CORRECTIONS:
            for bound in sorted({row.bound for row in rows}):
                chosen = [row for row in rows if (row.task, row.bound, row.correction) == (task, bound, correction)]
                if chosen:
                    yield task, bound, correction, chosen


def table(rows: list[Row]) -> str:
    lines = [
        "| task | correction | max_staleness | lag of tokens (max) | held-out success, mean (seeds) | in training |",
        "|---|---|---|---|---|---|",
    ]
    for task, bound, correction, chosen in summary(rows):
        after = ", ".join(f"{row.after:.3f}" for row in chosen)
        lag = f"{statistics.mean(row.lag for row in chosen):.1f} ({max(row.max_lag for row in chosen):.0f})"
        mean = f"**{statistics.mean(row.after for row in chosen):.3f}** ({after})"
        training = f"{statistics.mean(row.in_training for row in chosen):.3f}"
        lines.append(f"| {task} | {CORRECTIONS[correction]} | {bound} | {lag} | {mean} | {training} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib import pyplot

    tasks = [task for task in TASKS if any(row.task == task for row in rows)]
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 3.8), squeeze=False, sharey=True)
    for panel, task in zip(panels[0], tasks, strict=True):
        for correction, colour in zip(CORRECTIONS, ("#1b6ca8", "#d1495b"), strict=True):
            means = []
            for name, bound, kind, chosen in summary(rows):
                if (name, kind) == (task, correction):
                    means.append((bound, statistics.mean(row.after for row in chosen)))
                    panel.plot([bound] * len(chosen), [row.after for row in chosen], "o", color=colour, alpha=0.35)
            panel.plot(*zip(*means, strict=True), "-", color=colour, label=CORRECTIONS[correction])
        before = statistics.mean(row.before for row in rows if row.task == task)
        panel.axhline(before, color="gray", linestyle=":", label="before training")
        panel.set(title=f"{task}, {TASKS[task].steps} steps", xlabel="max_staleness (versions)", ylim=(0, 1))
    panels[0][0].set_ylabel("held-out success")
    panels[0][-1].legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 1, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=200, help="held-out samples")
    parser.add_argument("--rows", type=Path, default=Path("runs/staleness.jsonl"))
    parser.add_argument("--draw", type=Path, help="folder for staleness.png; the table is printed")
    options = parser.parse_args()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    rows = [Row(**json.loads(line)) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    wanted = [
        (task, bound, correction, seed)
        for task in options.tasks
        for seed in range(options.seeds)
        for bound in options.bounds
        for correction in CORRECTIONS
    ]
    for key in wanted:
        if key not in {row.key for row in rows}:
            rows.append(play(*key, samples=options.samples))
            with options.rows.open("a") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if options.draw:
        draw(rows, options.draw / "staleness.png")
    found = {f"{t}/{c}/{b}": statistics.mean(row.after for row in chosen) for t, b, c, chosen in summary(rows)}
    print(json.dumps({"success": found, "runs": len(rows)}))


if __name__ == "__main__":
    main()
