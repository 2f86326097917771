"""Reports of an evaluation: lines for people, and records for the JSON of the last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from learner.metrics.evaluation_metrics import Comparison, Estimate, estimates
from learner.tickets.ticket_book import EvaluationResult

DIGITS = 6
ENDING = "ending/"
FIRST = ("success", "reward")


def record_of(result: EvaluationResult) -> dict[str, Any]:
    """Return the record of a result: success with its interval first, then all other metrics by name as {"value",
    "low", "high"}. `lost` counts samples without a usable group."""
    by_name = estimates(result)
    return {
        **success_of(by_name),
        "samples": len(result.groups),
        "episodes": sum(len(group.trajectories) for _, group in result.groups),
        "lost": sum(result.lost.values()),
        "metrics": {name: values(e) for name, e in by_name.items() if name != "success" and ENDING not in name},
        "endings": {name.removeprefix(ENDING): values(e) for name, e in by_name.items() if name.startswith(ENDING)},
    }


def failures_of(result: EvaluationResult) -> Iterator[str]:
    """Yield a line for each kind of failure: the ending, how many episodes ended so, and the first one's sample and
    reason; then one for each reason why samples have no group."""
    failed = [
        (trajectory.ending.value, ticket.sample.id, trajectory.error)
        for ticket, group in result.groups
        for trajectory in group.trajectories
        if not trajectory.trainable
    ]
    for ending, count in Counter(ending for ending, _, _ in failed).most_common():
        _, sample, error = next(failure for failure in failed if failure[0] == ending)
        words = " ".join(error.split())[:300]
        yield f"{count} of the episodes ended as {ending}, the first of sample {sample}: {words}"
    for reason, count in result.lost.items():
        yield f"{count} of the samples have no episodes: {reason}"


def difference_of(comparison: Comparison) -> dict[str, Any]:
    """Return the record of the differences, first policy minus second: success, then all other metrics."""
    by_name = comparison.differences
    return {
        **success_of(by_name),
        "pairs": comparison.pairs,
        "better": comparison.better,
        "worse": comparison.worse,
        "metrics": {name: values(by_name[name]) for name in sorted(by_name) if name != "success"},
    }


def is_shown(record: Mapping[str, Any]) -> bool:
    """Tell whether a record of `difference_of` shows a difference of success: its interval excludes 0."""
    low, high = record["low"], record["high"]
    return low is not None and (low > 0 or high < 0)


def success_of(by_name: Mapping[str, Estimate]) -> dict[str, float | None]:
    """Return success with its interval; None values if every episode has failed."""
    if "success" not in by_name:
        return {"success": None, "low": None, "high": None}
    success = values(by_name["success"])
    return {"success": success.pop("value"), **success}


def values(estimate: Estimate) -> dict[str, float | None]:
    low, high = estimate.interval or (None, None)
    named = {"value": estimate.value, "low": low, "high": high}
    return {name: None if value is None else round(value, DIGITS) for name, value in named.items()}


def lines_of(record: Mapping[str, Any], *, signed: bool = False) -> Iterator[str]:
    """Yield a line for each number in a record of `record_of` or `difference_of`: name, value and 95 % interval. Left
    out are times in seconds, and metrics that are 0 with an interval of 0."""
    success = {"value": record["success"], "low": record["low"], "high": record["high"]}
    endings = {f"ended: {name}": value for name, value in record.get("endings", {}).items()}
    named = {"success": success, **record["metrics"], **endings}
    first = {name: value for name, value in named.items() if name in FIRST or name.startswith("pass@")}
    shown = {
        name: value
        for name, value in {**first, **named}.items()
        if value["value"] is not None and not name.endswith("_s") and (name in FIRST or any(value.values()))
    }
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        number = f"{value['value']:+9.3f}" if signed else f"{value['value']:9.3f}"
        interval = "" if value["low"] is None else f"[{value['low']:.3f}, {value['high']:.3f}]"
        yield f"{name:{width}} {number}  {interval}".rstrip()
