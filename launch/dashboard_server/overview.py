"""What a run amounts to in a line, its events, and how the recipes of several runs differ."""

from __future__ import annotations

from typing import Any

from launch.dashboard_server.recorded import listed
from launch.dashboard_server.runs import MAX_RUNS, RECENT, Run
from launch.dashboard_server.series import clean
from shared.recordings.reading import Place

SPARK = 60  # points of the small curve in a table
SHOWN = {
    "success": "rollout/success",
    "reward": "rollout/reward",
    "speed": "speed/turns_per_s",
    "learner_idle": "learner/idle_frac",
    "actors_idle": "actors/idle_frac",
    "step_s": "time/step_s",
    "failed": "rollout/failed",
}
LATEST = {"version": "policy_version", "minutes": "progress/minutes", "episodes": "progress/episodes"}


def overview(runs: list[Run], places_of: dict[str, list[Place]]) -> dict[str, Any]:
    """`places_of`: the recordings of each run."""
    return {"runs": [summary(run, listed(places_of[run.name])) for run in runs], "recipes": differences(runs)}


def summary(run: Run, places: dict[str, Any]) -> dict[str, Any]:
    steps, evaluations, total = run.metrics.steps, run.metrics.evaluations, run.total_steps()
    step = steps.last("step") or 0.0
    alarms, damaged_alarms = run.alarms()
    recorded, evaluations_recorded = places["steps"], places["evaluations"]
    said: dict[str, Any] = {name: steps.mean(metric, RECENT) for name, metric in SHOWN.items()}
    said |= {name: steps.last(metric) for name, metric in LATEST.items()}
    said |= {
        "name": run.name,
        "state": run.state(),
        "step": step,
        "total_steps": total,
        "time": steps.last("time"),
        "held_out": evaluations.last("eval/success"),
        "left_s": max(0.0, total - step) * (said["step_s"] or 0.0) if total else None,
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
    }
    return said


def endings(run: Run) -> dict[str, float]:
    """The mean share of each ending over the recent steps."""
    prefix = "rollout/ending/"
    names = [name for name in run.metrics.steps.columns if name.startswith(prefix)]
    recent = len(run.metrics.steps.columns["step"][-RECENT:])
    return {
        name.removeprefix(prefix): sum(v for v in run.metrics.steps.columns[name][-RECENT:] if v == v) / recent
        for name in names
    }


def thinned(values: Any) -> list[float | None]:
    """Means of about SPARK stretches."""
    shown = [value for value in values or () if value == value]
    width = max(1, -(-len(shown) // SPARK))
    parts = [shown[at : at + width] for at in range(0, len(shown), width)]
    return [clean(sum(part) / len(part)) for part in parts]


def events(run: Run) -> list[dict[str, Any]]:
    """What is marked in a run's curves: checkpoints, restarts, engines that were lost, alarms."""
    steps = run.metrics.steps
    found: list[dict[str, Any]] = [
        {"step": step, "kind": "checkpoint", "text": f"checkpoint of step {step}"} for step in run.checkpoints()
    ]
    found += [
        {"step": step, "kind": "resumed", "text": "the learner was started again"} for step in run.metrics.resumed
    ]
    for step, lost in zip(steps.columns["step"], steps.columns.get("publish/dropped", ()), strict=False):
        if lost > 0:
            found.append({"step": step, "kind": "engine lost", "text": f"{lost:.0f} engines left behind"})
    found += [
        {"step": a["step"], "kind": "alarm", "text": f"{a.get('rule', 'alarm')}: {a.get('message', '')}"}
        for a in run.alarms()[0]
    ]
    return sorted(found, key=lambda event: event["step"])[-1000:]


def differences(runs: list[Run]) -> list[dict[str, Any]]:
    """The fields that are not the same in all recipes, with the value of each run."""
    flat = {run.name: dict(flattened(run.recipe())) for run in runs[:MAX_RUNS]}
    names = sorted({name for fields in flat.values() for name in fields})
    rows = [{"field": name, "values": {run: fields.get(name, "") for run, fields in flat.items()}} for name in names]
    return [row for row in rows if len(set(map(str, row["values"].values()))) > 1]  # type: ignore[attr-defined]


def flattened(section: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every field of a recipe."""
    if not isinstance(section, dict):
        return [(prefix, section)]
    return [pair for key, value in section.items() for pair in flattened(value, f"{prefix}.{key}" if prefix else key)]
