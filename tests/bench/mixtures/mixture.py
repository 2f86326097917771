"""Three tasks in one run against a run of each: held-out success at the end.

    python -m tests.bench.mixtures.mixture FOLDER [--seeds 3] [--steps 60]

The mixture takes three times the steps, so that each task has as many episodes as by itself. Runs that FOLDER holds
already are not repeated. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.bench.mixtures.runs import MODULE, held_out, train

PLACES = ("whole", "left", "top")
SAMPLES = 400


def measure(folder: Path, seed: int, steps: int) -> dict[str, dict[str, float]]:
    """Return the held-out success of each task at the end: alone and in the mixture."""
    alone, mixed = {}, {}
    common: dict[str, Any] = {"eval.samples": SAMPLES, "eval.before": False, "learner.checkpoint.every": 0}
    common["learner.optimizer.schedule"] = "linear"  # at a constant rate the end is one of many ups and downs
    for place in PLACES:
        own = {"env.module": MODULE, "env.args": {"place": place}, "learner.total_steps": steps}
        rows = train(folder, f"{place}_{seed}", seed, common | own)
        alone[place] = held_out(rows)[-1][1]
    tasks = [{"name": place, "module": MODULE, "args": {"place": place}} for place in PLACES]
    rows = train(folder, f"mixture_{seed}", seed, common | {"tasks": tasks, "learner.total_steps": len(PLACES) * steps})
    for place in PLACES:
        mixed[place] = held_out(rows, f"eval/sets/{place}/success")[-1][1]
    return {"alone": alone, "mixed": mixed}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    found = []
    for seed in range(options.seeds):
        found.append(measure(options.folder, seed, options.steps))
        print(seed, json.dumps(found[-1]), flush=True)
    print("| task | alone | in the mixture | difference |\n|---|---|---|---|")
    result = {}
    for place in PLACES:
        alone, mixed = (statistics.mean(each[kind][place] for each in found) for kind in ("alone", "mixed"))
        print(f"| {place} | {alone:.3f} | {mixed:.3f} | {mixed - alone:+.3f} |")
        result[place] = mixed - alone
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
