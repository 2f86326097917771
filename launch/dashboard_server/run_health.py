"""The health page of a run: the last lines of its logs, refused messages, its checkpoints and its software."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from launch.dashboard_server.metric_columns import clean
from launch.dashboard_server.runs import Run, Unknown
from launch.recipe_fields import json_default
from shared.config.recipe import dotted_values, known_fields
from shared.redaction import redact_text

TAIL_BYTES = 64 << 10
TAIL_LINES = 200
MAX_LOGS = 64
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def health(run: Run) -> dict[str, Any]:
    steps, recipe = run.metrics.steps, run.recipe()
    latest = {name: clean(column[-1]) for name, column in steps.columns.items() if len(column)}
    worst = {
        name: clean(max((value for value in column if not math.isnan(value)), default=0.0))
        for name, column in steps.columns.items()
        if name.startswith(
            ("arrived/ending/", "rollout/ending/", "rollout/engine_retries", "checkpoint/failed", "publish/dropped")
        )
    }
    return {
        "state": run.state(),
        "words": run.words(),
        "steps": len(steps),
        "total_steps": run.total_steps(),
        "time": steps.last("time"),
        "latest": latest,
        "worst": worst,
        "logs": [{"name": path.name, "lines": tail(path)} for path in logs(run)],
        "rejected": [path.name for path in files_in(run, run.folder / "rejected", "*.msgpack")][-20:],
        "checkpoints": run.checkpoints(),
        "ranks": ranks(run),
        "best": run.json("checkpoints/best.json"),
        "result": run.json("result.json"),
        "recipe": recipe,
        "set_fields": set_fields_of(recipe),
        "software": run.json("software.json"),
    }


def set_fields_of(recipe: dict[str, Any]) -> list[str]:
    """Return the fields, as `section.field`, whose values are not the defaults."""
    fields = known_fields()
    return [
        name
        for name, value in dotted_values(recipe).items()
        if name not in fields or json_default(fields[name]) != value
    ]


def ranks(run: Run) -> int | None:
    """Return how many ranks the learner had at its newest checkpoint; None before the first."""
    kept = run.checkpoints()
    folder = run.folder / "checkpoints" / f"step_{kept[-1] if kept else 0:08d}" / "rng"
    return len(files_in(run, folder, "rank_*.pt")) or None


def logs(run: Run) -> list[Path]:
    """Return the logs in the run's folder, and its engines' logs in the folder of all runs, if that folder was
    given."""
    engines = run.folder.parent / "engines"
    return [
        *files_in(run, run.folder, "*.log"),
        *files_in(run, run.folder / "logs", "*.log"),
        *files_in(run, engines, f"{run.folder.name}-*.log"),
    ][:MAX_LOGS]


def files_in(run: Run, folder: Path, pattern: str) -> list[Path]:
    files = []
    for path in sorted(folder.glob(pattern)) if folder.is_dir() else ():
        try:
            if path.name.isprintable():
                files.append(run.file(path))
        except (Unknown, OSError):
            continue
    return files


def tail(path: Path) -> list[str]:
    """Return a file's last lines, without control characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    lines = (redact_text(line) for line in text.splitlines()[-TAIL_LINES:])
    return [_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line)[:2000] for line in lines]
