"""Makes the folder that the alarms' tests read of a run's own: the metrics that rules look at, and the recipe.

    python -m tests.support.alarms.healthy_run runs/sokoban_tiny tests/data/alarms

Numbers keep seven digits; nothing else is changed. A run without a step is refused, and one that takes more than
MAX_BYTES. `python -m learner.alarms` says of the run and of the folder whether they raise any.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from learner.alarms.replay import read_steps, recipe_of

MAX_BYTES = 300_000


def make(run: Path, folder: Path) -> None:
    """ValueError for what is no run, or too long a one."""
    steps = read_steps(run / "metrics.jsonl")
    rows = [{"step": step, **{name: short(row[name]) for name in sorted(row)}} for step, row in steps.items()]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    if not rows or len(lines) > MAX_BYTES:
        raise ValueError(
            f"{run}: {len(rows)} steps take {len(lines)} bytes; give a run of at least a step and at most {MAX_BYTES}"
        )
    recipe = recipe_of(run)
    recipe["run"] = {**recipe.get("run", {}), "name": "healthy", "dir": "runs"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "recipe.json").write_text(json.dumps(recipe) + "\n")


def short(value: float | None) -> float | None:
    """To a millisecond what is large, a time; null stays null, as what was not finite is written."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
