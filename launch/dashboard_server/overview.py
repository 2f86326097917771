"""The overview of runs: a summary of each, its events, and the differences between the runs' recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launch.dashboard_server.metric_columns import clean
from launch.dashboard_server.recorded import listed
from launch.dashboard_server.runs import MAX_RUNS, RECENT, Run, modified
from shared.recordings.reader import RecordingId

SPARK = 60  # points of the small curve in a table
SHOWN = {
    "success": "rollout/success",
    "reward": "rollout/reward",
    "speed": "speed/turns_per_s",
    "learner_idle": "learner/idle_frac",
    "actors_idle": "actors/idle_frac",
    "step_s": "time/step_s",
    "failed": "arrived/failed",
}
OF_A_TASK = ("success", "reward", "turns", "share", "without_variance")
LATEST = {"version": "policy_version", "minutes": "progress/minutes", "episodes": "progress/episodes"}


def overview(runs: list[Run], places_of: dict[str, list[RecordingId]]) -> dict[str, Any]:
    """Return the content of the page of all runs. `places_of`: the recordings of each run, by name."""
    folders = {run.folder for run in runs}
    return {
        "runs": [summary(run, listed(places_of[run.name]), folders) for run in runs],
        "recipes": differences(runs),
    }


def summary(run: Run, places: dict[str, Any], others: set[Path]) -> dict[str, Any]:
    steps, evaluations, total = run.metrics.steps, run.metrics.evaluations, run.total_steps()
    step = steps.last("step") or 0.0
    alarms, damaged_alarms = run.alarms()
    recorded, evaluations_recorded = places["steps"], places["evaluations"]
    values: dict[str, Any] = {name: steps.mean(metric, RECENT) for name, metric in SHOWN.items()}
    values |= {name: steps.last(metric) for name, metric in LATEST.items()}
    values |= {
        "name": run.name,
        "state": run.state(),
        "words": run.words(),
        "changed": max(map(modified, (run.folder / "metrics.jsonl", run.folder / "recipe.json", run.folder))),
        "is_aside": is_aside(run, others),
        "is_empty": not len(steps) and not recorded and not evaluations_recorded,
        "step": step,
        "total_steps": total,
        "time": steps.last("time"),
        "held_out": evaluations.last("eval/success"),
        "left_s": max(0.0, total - step) * (values["step_s"] or 0.0) if total else None,
        "spark": thinned(steps.columns.get("rollout/success")),
        "alarms": alarms[-100:],
        "alarm_count": sum(alarm["over"] is None for alarm in alarms),
        "damaged": run.metrics.num_damaged + damaged_alarms,
        "recorded": len(recorded),
        "recorded_first": recorded[0] if recorded else None,
        "recorded_last": recorded[-1] if recorded else None,
        "evaluations": len(evaluations_recorded),
        "evaluation_last": next((e for e in reversed(evaluations_recorded) if "-greedy" not in e), None)
        or (evaluations_recorded[-1] if evaluations_recorded else None),
        "endings": endings(run),
        "tasks": tasks(run),
        "sets": [{"name": name, "success": evaluations.last(f"eval/sets/{name}/success")} for name in sets(run)],
    }
    return values


def tasks(run: Run) -> list[dict[str, Any]]:
    """Return what each task of a run of several amounts to, over the recent steps."""
    steps = run.metrics.steps
    names = [match[1] for name in steps.columns if (match := re.fullmatch(r"tasks/([^/]+)/reward", name))]
    found = []
    for name in names:
        values: dict[str, Any] = {key: steps.mean(f"tasks/{name}/{key}", RECENT) for key in OF_A_TASK}
        spark = thinned(steps.columns.get(f"tasks/{name}/success"))
        held_out = run.metrics.evaluations.last(f"eval/sets/{name}/success")
        found.append({"name": name, "spark": spark, "held_out": held_out, **values})
    return found


def sets(run: Run) -> list[str]:
    """Return the names of a run's held-out sets, if there are several."""
    columns = run.metrics.evaluations.columns
    return [match[1] for name in columns if (match := re.fullmatch(r"eval/sets/([^/]+)/success", name))]


def is_aside(run: Run, others: set[Path]) -> bool:
    """Tell whether the run was moved aside, as NAME.1, by a newer one that is shown too."""
    name, _, number = run.folder.name.rpartition(".")
    return number.isdigit() and run.folder.with_name(name) in others


def endings(run: Run) -> dict[str, float]:
    """Return the mean share of each ending over the recent steps."""
    prefix = "rollout/ending/"
    names = [name for name in run.metrics.steps.columns if name.startswith(prefix)]
    recent = len(run.metrics.steps.columns["step"][-RECENT:])
    return {
        name.removeprefix(prefix): sum(v for v in run.metrics.steps.columns[name][-RECENT:] if v == v) / recent
        for name in sorted(names)
    }


def thinned(values: Any) -> list[float | None]:
    """Return the means of about SPARK consecutive parts of the values."""
    shown = [value for value in values or () if value == value]
    width = max(1, -(-len(shown) // SPARK))
    parts = [shown[at : at + width] for at in range(0, len(shown), width)]
    return [clean(sum(part) / len(part)) for part in parts]


def events(run: Run) -> list[dict[str, Any]]:
    """Return the events to mark in a run's curves: checkpoints, restarts, lost engines, alarms."""
    steps = run.metrics.steps
    marks: list[dict[str, Any]] = [
        {"step": step, "kind": "checkpoint", "text": f"checkpoint of step {step}"} for step in run.checkpoints()
    ]
    marks += [
        {"step": step, "kind": "resumed", "text": "the learner was started again"} for step in run.metrics.resumed
    ]
    for step, lost in zip(steps.columns["step"], steps.columns.get("publish/dropped", ()), strict=False):
        if lost > 0:
            marks.append({"step": step, "kind": "engine lost", "text": f"{lost:.0f} engines left behind"})
    marks += [
        {"step": a["step"], "kind": "alarm", "text": f"{a.get('rule', 'alarm')}: {a.get('message', '')}"}
        for a in run.alarms()[0]
    ]
    return sorted(marks, key=lambda event: event["step"])[-1000:]


def differences(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the recipe fields that differ between runs, with the value of each run."""
    flat = {run.name: dict(flattened(run.recipe())) for run in runs[:MAX_RUNS]}
    names = sorted({name for fields in flat.values() for name in fields})
    rows = [{"field": name, "values": {run: fields.get(name, "") for run, fields in flat.items()}} for name in names]
    return [row for row in rows if len(set(map(str, row["values"].values()))) > 1]  # type: ignore[attr-defined]


def flattened(section: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted name, value) of every field of a recipe."""
    if isinstance(section, list) and section and all(isinstance(each, dict) and each.get("name") for each in section):
        section = {each["name"]: each for each in section}  # tasks, pools and held-out sets
    if not isinstance(section, dict):
        return [(prefix, section)]
    return [pair for key, value in section.items() for pair in flattened(value, f"{prefix}.{key}" if prefix else key)]
