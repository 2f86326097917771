"""Difficulty pools against drawing all samples alike, on a mixture of which 60 % is solved at the start: the episodes
until the rest is solved too.

    python -m tests.bench.mixtures.pools FOLDER [--seeds 3] [--height 0.9]

The model first learns one kind of picture (`whole`). Then it trains on thirty pictures: eighteen of that kind, and the
twelve there are of another one (`left`). How many of these pictures it solves is measured as an evaluation. Runs that
FOLDER holds already are not repeated. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

from envs.colour import COLOURS
from tests.bench.mixtures.runs import MODULE, held_out, newest_checkpoint, train

KNOWN, NEW = "whole", "left"
REPEATS = 16  # episodes of each picture in an evaluation
EVERY = 2  # steps between two evaluations
GROUPS, GROUP_SIZE = 4, 8
POOLS = [
    {"name": "never", "bounds": [0.0, 0.1], "weight": 1.0},
    {"name": "some", "bounds": [0.1, 0.9], "weight": 1.0},
    {"name": "always", "bounds": [0.9, 1.0], "weight": 0.03},
]


def pictures(folder: Path) -> Path:
    """Write the pictures of each kind, and of both, as datasets; return their folder."""
    pairs = list(permutations(COLOURS, 2))
    rows: dict[str, list[dict[str, Any]]] = {
        NEW: [{"place": NEW, "colour": colour, "other": other} for colour, other in pairs],
        KNOWN: [
            {"place": KNOWN, "colour": a, "other": b, "copy": i // 12} for i, (a, b) in enumerate((pairs * 2)[:18])
        ],
    }
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, configs in (*rows.items(), ("both", [*rows[KNOWN], *rows[NEW]])):
        lines = (json.dumps({"extra_info": {"env_config": config}}) + "\n" for config in configs)
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines))
    return folder / "data"


def start(folder: Path, seed: int) -> str:
    """Return the model that knows one kind of picture."""
    own: dict[str, Any] = {"env.module": MODULE, "learner.total_steps": 80, "learner.checkpoint.export": True}
    train(folder, f"start_{seed}", seed, own | {"eval.before": False, "eval.samples": 200})
    return newest_checkpoint(folder, f"start_{seed}")


def measure(folder: Path, seed: int, steps: int, height: float, pools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run amounts to: success at its start, and the episodes until the mean over the mixture, and over
    the new kinds, has reached the height."""
    data = pictures(folder)
    fields = {
        "model.path": start(folder, seed),
        "env.module": MODULE,
        "data.source": str(data / "both.jsonl"),
        "eval.sets": [{"name": place, "source": str(data / f"{place}.jsonl")} for place in (KNOWN, NEW)],
        "eval.samples": 30,
        "eval.repeats": REPEATS,
        "eval.every_steps": EVERY,
        "learner.total_steps": steps,
        "learner.groups_per_step": GROUPS,
        "learner.group_size": GROUP_SIZE,
        "actor.groups": GROUPS,
        "learner.optimizer.lr": 5e-4,
        "pools": pools,
    }
    rows = train(folder, f"{'pools' if pools else 'alike'}_{seed}", seed, fields)
    known, new = (dict(held_out(rows, f"eval/sets/{place}/success")) for place in (KNOWN, NEW))
    whole = {step: 0.6 * known[step] + 0.4 * new[step] for step in new}
    after = max(whole)
    return {
        "before": whole[0],
        "episodes": reached(whole, height),
        "after": {KNOWN: known[after], NEW: new[after]},
        "curve": [round(value, 3) for value in whole.values()],
    }


def reached(values: dict[int, float], height: float) -> int | None:
    """Return the episodes at the first evaluation from which on two in a row have the height."""
    steps = sorted(values)
    for step, following in pairwise(steps):
        if min(values[step], values[following]) >= height:
            return step * GROUPS * GROUP_SIZE
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--height", type=float, default=0.9)
    options = parser.parse_args(argv)
    shares = []
    print("| seed | success at the start | all alike | with pools | share | known kind at the end: alike, with pools |")
    print("|---|---|---|---|---|---|")
    for seed in range(options.seeds):
        alike, pooled = (measure(options.folder, seed, options.steps, options.height, p) for p in ([], POOLS))
        both = alike["episodes"], pooled["episodes"]
        share = None if None in both else round(both[1] / both[0], 2)
        shares.append(share)
        known = f"{alike['after'][KNOWN]:.3f}, {pooled['after'][KNOWN]:.3f}"
        print(f"| {seed} | {alike['before']:.2f} | {both[0]} | {both[1]} | {share} | {known} |", flush=True)
        print(json.dumps({"seed": seed, "alike": alike, "pools": pooled}), file=sys.stderr, flush=True)
    print(json.dumps({"shares": shares}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
