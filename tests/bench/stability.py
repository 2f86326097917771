"""Objectives on small problems with known answers: the optimum reached, of so many seeds, and the steps it took.

    python -m tests.bench.stability [--seeds 10] [--only NAME ...] [--rows FILE]

The same problems with a constant added to all rewards. The learner's own trainer with default settings, but for a
small model's learning rates, on episodes of the policy one step ago (as `learner.max_staleness` = 1 gives them). Then
what no policy can do better at, where the policy is to stay: KL to the start after 500 steps. Then episodes that are
two and four steps old, with correction and without. Each row is appended to FILE as soon as it is known; rows that it
holds already are not repeated. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from learner.distributed import Ranks, close_ranks, init_ranks
from tests.support.small.problems import PROBLEMS, UNTEACHABLE
from tests.support.small.runs import OBJECTIVES, drift, learn

LEARNED_STEPS, DRIFT_STEPS = 250, 500
STALE_PROBLEMS = ("lock",)
SHIFTED_PROBLEMS, SHIFTS = ("two_arms", "lock"), (5, 20, 100)
SLOW_NOISE, SLOW_RATE = "noise, a fifth of the rate", 2e-4  # a random walk goes with the square of it
Row = dict[str, Any]


def cases() -> Iterator[tuple[str, str, int, str]]:
    """(problem, objective, lag, correction) of each row of the tables."""
    for problem in (*PROBLEMS, *UNTEACHABLE, SLOW_NOISE):
        for objective in OBJECTIVES:
            yield problem, objective, 1, "importance"
    for problem in SHIFTED_PROBLEMS:
        for shift in SHIFTS:
            for objective in OBJECTIVES:
                yield f"{problem} + {shift}", objective, 1, "importance"
    for problem in STALE_PROBLEMS:
        for lag in (2, 4):
            for correction in ("importance", "none"):
                for objective in OBJECTIVES:
                    yield problem, objective, lag, correction


def measure(problem: str, objective: str, lag: int, correction: str, seeds: int, ranks: Ranks) -> Row:
    """One row: of a problem that can be learned, how many seeds reached its optimum and kept it; else the drift."""
    settings = {**OBJECTIVES[objective], "correction": correction, "lag": lag}
    row: Row = {"problem": problem, "objective": objective, "lag": lag, "correction": correction, "seeds": seeds}
    name, _, shift = problem.partition(" + ")
    if name not in PROBLEMS:
        settings |= {"lr": SLOW_RATE} if problem == SLOW_NOISE else {}
        run = partial(drift, UNTEACHABLE[problem.split(",")[0]], ranks, steps=DRIFT_STEPS, **settings)
        moved = [run(seed=seed) for seed in range(seeds)]
        return row | {"kl_mean": statistics.mean(moved), "kl_max": max(moved)}
    shifted = replace(PROBLEMS[name], shift=float(shift or 0))
    runs = [learn(shifted, ranks, seed=seed, steps=LEARNED_STEPS, **settings) for seed in range(seeds)]
    steps = [run.reached for run in runs if run.reached is not None]
    found = {"reached": len(steps), "kept": sum(run.kept for run in runs)}
    return (
        row
        | found
        | {"steps_median": statistics.median(steps) if steps else None, "steps_max": max(steps, default=None)}
    )


def cell(row: Row) -> str:
    if "kl_max" in row:
        return f"{row['kl_max']:.2g}"
    steps = "-" if row["steps_median"] is None else f"{row['steps_median']:g} ({row['steps_max']})"
    kept = "" if row["kept"] == row["reached"] else f", kept by {row['kept']}"
    return f"{row['reached']} of {row['seeds']}: {steps}{kept}"


def table(rows: list[Row], title: str) -> str:
    """Markdown: a line for each problem, lag and correction, a column for each objective."""
    lines = [f"| {title} | {' | '.join(OBJECTIVES)} |", "|---" * (1 + len(OBJECTIVES)) + "|"]
    kinds = list(dict.fromkeys((row["problem"], row["lag"], row["correction"]) for row in rows))
    for problem, lag, correction in kinds:
        own = {
            row["objective"]: cell(row)
            for row in rows
            if (row["problem"], row["lag"], row["correction"]) == (problem, lag, correction)
        }
        name = problem if lag == 1 else f"{problem}, {lag} steps old, {correction}"
        lines.append(f"| {name} | {' | '.join(own.get(each, '') for each in OBJECTIVES)} |")
    return "\n".join(lines)


def measured(seeds: int, only: list[str], kept: Path | None, ranks: Ranks) -> Iterator[Row]:
    """The rows, with those that `kept` holds already."""
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    for case in cases():
        if only and not {case[0], case[1]} & set(only):
            continue
        key = dict(zip(("problem", "objective", "lag", "correction"), case, strict=True)) | {"seeds": seeds}
        row = next((row for row in known if key.items() <= row.items()), None)
        if row is None:
            row = measure(*case, seeds, ranks)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{case[0]}, {case[1]}, lag {case[2]}, {case[3]}: {cell(row)}", flush=True)
        yield row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], help="problems or objectives; left out: all of them")
    parser.add_argument("--rows", type=Path, default=None, metavar="FILE", help="where rows are kept, one a line")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = list(measured(options.seeds, options.only, options.rows, init_ranks("cpu")))
    close_ranks()
    learned, moved = [r for r in rows if "reached" in r], [r for r in rows if "kl_max" in r]
    fresh, stale = [r for r in learned if r["lag"] == 1], [r for r in learned if r["lag"] > 1]
    titles = ("steps to the optimum: median (most)", "KL to the start after 500 steps, the most", "older episodes")
    for title, part in zip(titles, (fresh, moved, stale), strict=True):
        print(f"\n{table(part, title)}")
    problems = dict.fromkeys(r["problem"] for r in moved)
    result = {
        "runs": sum(r["seeds"] for r in fresh),
        "optimum_reached": sum(r["reached"] for r in fresh),
        "optimum_kept": sum(r["kept"] for r in fresh),
        "kl_max": {name: max(r["kl_max"] for r in moved if r["problem"] == name) for name in problems},
        "rows": rows,
    }
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
