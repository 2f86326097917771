"""The API's paths and their answers, for the served pages and for standalone reports alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.dashboard_server.catalogue import LAG, described
from launch.dashboard_server.overview import events, overview
from launch.dashboard_server.recorded import episode_page, listed, recorded, step_page
from launch.dashboard_server.run_health import health
from launch.dashboard_server.runs import Run, Runs, Unknown
from launch.dashboard_server.timelines import timeline, traces
from shared.recordings.reader import RecordingId

MAX_NAMES = 64  # metrics in one request
AXES = ("step", "time", "progress/minutes", "progress/episodes")


def answer(runs: Runs, path: str, query: Mapping[str, str]) -> Any:
    """Return the answer as JSON values. Raise Unknown if there is no such page, RecordingError if the recording is
    damaged."""
    parts = path.strip("/").split("/")
    if parts == ["runs"]:
        known = [runs.get(run.name) for run in runs.all()]
        return overview(known, {run.name: recorded(run) for run in known})
    if parts[0] != "runs" or len(parts) < 3:
        raise Unknown(f"no page {path}")
    run = runs.get(parts[1])
    match parts[2:]:
        case ["metrics"]:
            return names(run)
        case ["series"]:
            return series(run, query.get("names", "").split(","))
        case ["steps"]:
            return listed(recorded(run))
        case ["steps", step]:
            return step_page(run, place(step))
        case ["steps", step, *ticket, index] if ticket:  # a ticket's id may hold slashes
            return episode_page(run, place(step), "/".join([*ticket, index]))
        case ["health"]:
            return health(run)
        case ["traces"]:
            return traces(run)
        case ["traces", name]:
            return timeline(run, name)
    raise Unknown(f"no page {path}")


def place(text: str) -> RecordingId:
    try:
        return RecordingId.parse(text)
    except ValueError as error:
        raise Unknown(str(error)) from None


def names(run: Run) -> dict[str, Any]:
    """Return every metric with its meaning. Metrics split by lag are listed under the metric that they split."""
    known = {*run.metrics.steps.columns, *run.metrics.evaluations.columns} - {"step", "time"}
    metrics: dict[str, dict[str, Any]] = {}
    for name in sorted(known):
        split = LAG.match(name)
        if split and split[1] in known:
            metrics.setdefault(split[1], {"name": split[1], "lags": [], **described(split[1])})["lags"].append(name)
        else:
            metrics.setdefault(name, {"name": name, "lags": [], **described(name)})
    return {"metrics": sorted(metrics.values(), key=lambda metric: (metric["place"], metric["name"]))}


def series(run: Run, wanted: list[str], limit: int = MAX_NAMES) -> dict[str, Any]:
    """Return columns by name, with their axes; columns of evaluations have separate axes."""
    steps, evaluations = run.metrics.steps, run.metrics.evaluations
    return {
        "axes": {name: steps.show(name) for name in AXES if name in steps.columns},
        "evaluation_axes": {name: evaluations.show(name) for name in ("step", "time")},
        "values": {name: steps.show(name) for name in wanted[:limit] if name in steps.columns},
        "evaluations": {
            name: evaluations.show(name)
            for name in wanted[:limit]
            if name in evaluations.columns and name not in steps.columns
        },
        "events": events(run),
    }
