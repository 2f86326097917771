"""What an evaluation says: lines for a person, and records for the last line's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from learner.metrics.evaluation import Comparison, Estimate, estimates
from learner.tickets.book import EvaluationResult

DIGITS = 6
ENDING = "ending/"
FIRST = ("success", "reward")


def record_of(result: EvaluationResult) -> dict[str, Any]:
    """Success with its interval first, then all else by name: {"value", "low", "high"}. `lost`: samples without any
    group of use."""
    found = estimates(result)
    return {
        **success_of(found),
        "samples": len(result.groups),
        "episodes": sum(len(group.trajectories) for _, group in result.groups),
        "lost": sum(result.lost.values()),
        "metrics": {name: values(e) for name, e in found.items() if name != "success" and ENDING not in name},
        "endings": {name.removeprefix(ENDING): values(e) for name, e in found.items() if ENDING in name},
    }


def difference_of(comparison: Comparison) -> dict[str, Any]:
    """The first policy's success minus the other's, and so on."""
    found = comparison.differences
    return {
        **success_of(found),
        "pairs": comparison.pairs,
        "better": comparison.better,
        "worse": comparison.worse,
        "metrics": {name: values(found[name]) for name in sorted(found) if name != "success"},
    }


def success_of(found: Mapping[str, Estimate]) -> dict[str, float | None]:
    """None where every episode has failed."""
    if "success" not in found:
        return {"success": None, "low": None, "high": None}
    said = values(found["success"])
    return {"success": said.pop("value"), **said}


def values(estimate: Estimate) -> dict[str, float | None]:
    low, high = estimate.interval or (None, None)
    named = {"value": estimate.value, "low": low, "high": high}
    return {name: None if value is None else round(value, DIGITS) for name, value in named.items()}


def lines_of(record: Mapping[str, Any], *, signed: bool = False) -> Iterator[str]:
    """A line for each number of a record of the two above: its name, its value, its interval of 95 %. Seconds are left
    out, and what is 0 throughout."""
    success = {"value": record["success"], "low": record["low"], "high": record["high"]}
    endings = {f"ended: {name}": said for name, said in record.get("endings", {}).items()}
    named = {"success": success, **record["metrics"], **endings}
    first = {name: said for name, said in named.items() if name in FIRST or name.startswith("pass@")}
    shown = {
        name: said
        for name, said in {**first, **named}.items()
        if said["value"] is not None and not name.endswith("_s") and (name in FIRST or any(said.values()))
    }
    width = max(map(len, shown), default=0)
    for name, said in shown.items():
        number = f"{said['value']:+9.3f}" if signed else f"{said['value']:9.3f}"
        interval = "" if said["low"] is None else f"[{said['low']:.3f}, {said['high']:.3f}]"
        yield f"{name:{width}} {number}  {interval}".rstrip()
