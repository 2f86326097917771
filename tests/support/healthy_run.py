"""Makes the test data of the alarms from a run's folder: the metrics that the rules need, and the recipe.

    python -m tests.support.healthy_run runs/sokoban_tiny tests/data/alarms

Numbers are rounded to seven digits; nothing else is changed. A run without a step, or with metrics of more than
MAX_BYTES, is refused. `python -m learner.alarms` shows whether the run and the folder raise any alarm.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from learner.alarms.alarm_replay import read_steps, recipe_of

MAX_BYTES = 300_000


def make(run: Path, folder: Path) -> None:
    """Make the files from a run. Raise ValueError if it has no steps, or is too long."""
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
    """Round to seven digits, but large values, which are times, to a millisecond. A value that is None or not finite
    becomes None."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
