"""What a run's parts say of themselves: the last lines of its logs, what was refused, the software that runs it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from launch.dashboard_server.runs import Run, Unknown
from launch.dashboard_server.series import clean

TAIL_BYTES = 64 << 10
TAIL_LINES = 200
MAX_LOGS = 64
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def health(run: Run) -> dict[str, Any]:
    steps = run.metrics.steps
    latest = {name: clean(column[-1]) for name, column in steps.columns.items() if len(column)}
    worst = {
        name: clean(max((value for value in column if not math.isnan(value)), default=0.0))
        for name, column in steps.columns.items()
        if name.startswith(("rollout/ending/", "rollout/engine_retries", "checkpoint/failed", "publish/dropped"))
    }
    return {
        "latest": latest,
        "worst": worst,
        "logs": [{"name": path.name, "lines": tail(path)} for path in logs(run)],
        "rejected": [path.name for path in files_in(run, run.folder / "rejected", "*.msgpack")][-20:],
        "checkpoints": run.checkpoints(),
        "ranks": ranks(run),
        "best": run.json("checkpoints/best.json"),
        "result": run.json("result.json"),
        "recipe": run.recipe(),
        "software": run.json("software.json"),
    }


def ranks(run: Run) -> int | None:
    """How many ranks the learner had at its newest checkpoint; None before the first."""
    kept = run.checkpoints()
    folder = run.folder / "checkpoints" / f"step_{kept[-1] if kept else 0:08d}" / "rng"
    return len(files_in(run, folder, "rank_*.pt")) or None


def logs(run: Run) -> list[Path]:
    """Of the run's own folder, and its engines' in the folder of all runs where that was given too."""
    engines = run.folder.parent / "engines"
    return [
        *files_in(run, run.folder, "*.log"),
        *files_in(run, run.folder / "logs", "*.log"),
        *files_in(run, engines, f"{run.folder.name}-*.log"),
    ][:MAX_LOGS]


def files_in(run: Run, folder: Path, pattern: str) -> list[Path]:
    found = []
    for path in sorted(folder.glob(pattern)) if folder.is_dir() else ():
        try:
            if path.name.isprintable():
                found.append(run.file(path))
        except (Unknown, OSError):
            continue
    return found


def tail(path: Path) -> list[str]:
    """The last lines, without what a terminal or a page would obey."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    return [_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line)[:2000] for line in text.splitlines()[-TAIL_LINES:]]
