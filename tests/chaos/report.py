"""The results of a chaos run: the audit of the ledger, and the tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.checkpoints.checkpoint_folder import step_of
from tests.chaos.system import as_json

LIMITS_S = {
    "actor killed: connected": 15.0,
    "engine killed: has the run's weights": 15.0,
    "learner rank killed": 60.0,
    "learner killed": 60.0,
}


@dataclass(frozen=True, slots=True)
class Recovery:
    """`learner_away`: the learner was away for a part of that time, and nothing recovers without it."""

    seconds: float
    learner_away: bool


def audit(run: Path, tickets_of: Mapping[bytes, Set[int]] | None = None) -> dict[str, Any]:
    """Checks by the ledger and the last checkpoint that each issued ticket is trained once, dropped, or open, and that
    no episode was trained under two tickets (`tickets_of`: the numbers of each episode's, by its fingerprint)."""
    steps: dict[int, list[int]] = {}
    for entry in map(as_json, (run / "ledger.jsonl").read_text().splitlines()):
        if entry:
            steps = {step: tickets for step, tickets in steps.items() if step < entry["step"]}
            steps[entry["step"]] = entry["tickets"]
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    step = int(last.name.removeprefix("step_"))
    state = json.loads((last / "meta.json").read_text())["intake"]["tickets"]
    trained = [ticket for number, tickets in steps.items() if number <= step for ticket in tickets]
    missing = [number for number in range(1, step + 1) if number not in steps]
    still_open = {number for number, _ in state["open"]}
    dropped = sum(state["dropped"].values())
    return {
        "issued": state["issued"], "trained": len(trained), "dropped": state["dropped"], "open": len(still_open),
        "reissued": state["reissued"], "steps": step, "steps_missing_in_ledger": len(missing),
        "duplicates": len(trained) - len(set(trained)) + len(still_open & set(trained)),
        "episodes_trained_twice": sum(len(set(trained) & found) > 1 for found in (tickets_of or {}).values()),
        "lost": state["issued"] - len(set(trained)) - dropped - len(still_open),
    }  # fmt: skip


def went_on_from(checkpoint: Path, ledger: Path, since: int) -> bool | None:
    """Whether the first step that the ledger has beyond `since` bytes, and that the checkpoint has not, is the one that
    follows it; None while there is none."""
    if not ledger.exists():
        return None
    with ledger.open("rb") as file:
        file.seek(since)
        lines = file.read().decode(errors="replace").splitlines()
    steps = [int(entry["step"]) for entry in map(as_json, lines) if "step" in entry]
    later = [step for step in steps if step > step_of(checkpoint)]
    return later[0] == step_of(checkpoint) + 1 if later else None


def learning(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    rewards = [row["rollout/reward"] for row in rows]
    return {
        "reward_first": round(statistics.mean(rewards[:3]), 3),
        "reward_last": round(statistics.mean(rewards[-5:]), 3),
        "steps_with_agents": sum("rollout/agent_segments" in row for row in rows),
    }


def table(injected: Counter[str], recovered: Mapping[str, Sequence[Recovery]], found: Mapping[str, Any]) -> str:
    """Markdown, with a row for each thing that a fault holds up (`fault: thing`)."""
    lines = [
        "| fault | injected | survived | median, s | longest, s | limit, s | learner away too | longest, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(recovered):
        alone = [r.seconds for r in recovered[name] if not r.learner_away]
        other = [r.seconds for r in recovered[name] if r.learner_away]
        cells = [name, injected[name.partition(":")[0]] or 1, len(alone) + len(other)]
        cells += [f"{statistics.median(alone):.1f}", f"{max(alone):.1f}"] if alone else ["", ""]
        cells += [f"{LIMITS_S[name]:g}" if name in LIMITS_S else "", len(other), f"{max(other):.1f}" if other else ""]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| ledger | |", "|---|---|"]
    for name, value in found.items():
        text = ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, dict) else value
        lines.append(f"| {name.replace('_', ' ')} | {text} |")
    return "\n".join(lines)


def slow(recovered: Mapping[str, Sequence[Recovery]]) -> dict[str, str]:
    """How many recoveries took longer than their limit, of those that did not have to wait for the learner."""
    counts = {}
    for name, limit in LIMITS_S.items():
        alone = [r.seconds for r in recovered.get(name, ()) if not r.learner_away]
        if late := sum(seconds > limit for seconds in alone):
            counts[name] = f"{late} of {len(alone)}"
    return counts


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({platform.machine()}), load {load:.1f}, Python {platform.python_version()}"
