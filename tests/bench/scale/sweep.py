"""Simulations by number of GPUs: each system with its best split, designs of publication, tails, and splits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from learner.model.duration import Speed
from learner.model.memory import Setting
from learner.model.sizes import ModelSizes, find
from learner.scale.assumed import Serving, engine_gpus, loop_of
from learner.scale.records import Loop, Rule
from learner.scale.simulation import simulate
from learner.scale.split import miniature

EPISODES_A_GPU, MOST_EPISODES, GROUP_SIZE = 32, 8192, 8  # of a step
SIMULATED = 512  # of these, at most; more are simulated in miniature
STEPS, MOST_SKIP = 8, 4
SHARES = (0.125, 0.25, 0.5)  # of the GPUs, the learner's
BOUNDS = (0, 1, 2, 4, 8)
OURS = "Pronk, max_staleness {}"
COLOCATED, ONE_STEP_OFF = "synchronous, all GPUs in turn", "one step off"
DESIGNS = ("paused", "staged", "relay")
SLOWER = (1, 30)  # publications, times what is assumed
LARGE, LARGE_FROM = "Qwen3-VL-235B-A22B", 128  # a model whose publications take longer; GPUs
SIGMAS = (0.5, 1.0, 1.5)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation. `share`: of the GPUs, the learner's; 1 = all have both parts in turn."""

    model: str
    kind: str  # table
    system: str
    gpus: int
    share: float
    max_staleness: int
    rule: Rule = "tickets"
    design: str = "staged"
    slower: float = 1.0
    sigma: float = 1.0


def cases(model: str, gpus: list[int]) -> Iterator[Case]:
    for count in gpus:
        yield Case(model, "systems", COLOCATED, count, 1.0, 0, design="paused")
        for share in SHARES:
            one = partial(Case, model, "systems", gpus=count, share=share)
            yield one(system=ONE_STEP_OFF, max_staleness=1, rule="one_step_off", design="paused")
            for bound in BOUNDS:
                yield one(system=OURS.format(bound), max_staleness=bound)
        for slower in SLOWER:
            for design in DESIGNS:
                yield Case(model, "designs", design, count, 0.25, 4, design=design, slower=slower)
    for design in DESIGNS if gpus[-1] >= LARGE_FROM else ():
        yield Case(LARGE, "large", design, gpus[-1], 0.25, 4, design=design)
    middle = sorted(gpus)[len(gpus) // 2]
    for sigma in SIGMAS:
        yield Case(model, "tails", COLOCATED, middle, 1.0, 0, design="paused", sigma=sigma)
        for bound in (1, 4, 8):
            yield Case(model, "tails", OURS.format(bound), middle, 0.25, bound, sigma=sigma)


def loop(case: Case, sizes: ModelSizes) -> Loop:
    """Of so many GPUs. Several engines at least, and a learner."""
    episodes = min(EPISODES_A_GPU * case.gpus, MOST_EPISODES)
    setting = Setting(episodes=episodes, activation_checkpointing=True)
    of_engine = engine_gpus(sizes, setting)
    learner = case.gpus if case.share == 1 else of_engine * max(1, round(case.gpus * case.share / of_engine))
    engines = (case.gpus if case.share == 1 else case.gpus - learner) // of_engine
    made = loop_of(
        sizes, replace(setting, gpus=learner), engines, group_size=GROUP_SIZE, max_staleness=case.max_staleness,
        design=case.design, speed=Speed(), serving=Serving(sigma=case.sigma),  # type: ignore[arg-type]
    )  # fmt: skip
    sent = made.publication
    sent = replace(sent, send_s=sent.send_s * case.slower, handover_s=sent.handover_s * case.slower)
    return replace(made, publication=sent, rule=case.rule)


def sweep(model: str, gpus: list[int], kept: Path) -> list[Row]:
    """A row a case; those that `kept` holds are not made again. ValueError: an unknown model."""
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    kept.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in cases(model, sorted(gpus)):
        row = next((row for row in known if asdict(case).items() <= row.items()), None)
        if row is None:
            skip = min(MOST_SKIP, case.max_staleness + 1)
            small, times = miniature(loop(case, find(case.model)), SIMULATED)
            outcome = simulate(small, STEPS + skip, skip=skip)
            row = {**asdict(outcome), "most_stale": outcome.max_staleness, **asdict(case)}
            row["episodes_per_s"] = outcome.episodes_per_s * times
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
        rows.append(row)
    return rows


def best(rows: list[Row], system: str, gpus: int) -> Row:
    """The row of the best split of a system."""
    own = [row for row in rows if (row["kind"], row["system"], row["gpus"]) == ("systems", system, gpus)]
    return max(own, key=lambda row: row["episodes_per_s"])


def systems() -> list[str]:
    return [COLOCATED, ONE_STEP_OFF, *(OURS.format(bound) for bound in BOUNDS)]


def sizes_of(rows: list[Row]) -> list[int]:
    return sorted({row["gpus"] for row in rows})


def tables(rows: list[Row]) -> str:
    """Markdown."""
    gpus = sizes_of(rows)
    lines = [f"| episodes/s (times synchronous; mean staleness) | {' | '.join(f'{n} GPUs' for n in gpus)} |"]
    lines.append("|---" * (len(gpus) + 1) + "|")
    for system in systems():
        cells = []
        for count in gpus:
            row, base = best(rows, system, count), best(rows, COLOCATED, count)
            times = row["episodes_per_s"] / base["episodes_per_s"]
            share = "" if row["share"] == 1 else f"; {row['share']:.0%}"
            cells.append(f"{row['episodes_per_s']:.3g} (**{times:.2f}**; {abs(row['staleness']):.1f}{share})")
        lines.append(f"| {system} | {' | '.join(cells)} |")
    for slower in SLOWER:
        lines += ["", f"| publications that take {slower} times as long | {' | '.join(f'{n} GPUs' for n in gpus)} |"]
        lines.append("|---" * (len(gpus) + 1) + "|")
        of = [row for row in rows if row["kind"] == "designs" and row["slower"] == slower]
        for design in DESIGNS:
            own = {row["gpus"]: row["episodes_per_s"] for row in of if row["design"] == design}
            lines.append(f"| {design} | {' | '.join(f'{own[count]:.4g}' for count in gpus)} |")
    if large := [row for row in rows if row["kind"] == "large"]:
        made = ", ".join(f"{row['design']} {row['episodes_per_s']:.4g}" for row in large)
        lines += ["", f"{LARGE}, {gpus[-1]} GPUs, episodes/s: {made}"]
    lines += ["", *tails(rows)]
    return "\n".join(lines)


def tails(rows: list[Row]) -> list[str]:
    of = [row for row in rows if row["kind"] == "tails"]
    lines = [f"| episodes/s with {of[0]['gpus']} GPUs | {' | '.join(f'sigma {sigma}' for sigma in SIGMAS)} |"]
    lines.append("|---" * (len(SIGMAS) + 1) + "|")
    for system in dict.fromkeys(row["system"] for row in of):
        own = {row["sigma"]: row["episodes_per_s"] for row in of if row["system"] == system}
        lines.append(f"| {system} | {' | '.join(f'{own[sigma]:.3g}' for sigma in SIGMAS)} |")
    return lines
