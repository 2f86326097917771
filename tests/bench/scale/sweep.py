"""Simulations by number of GPUs: each system with several splits, designs of publication, and tails."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from learner.plan.duration import Speed
from learner.plan.memory_use import Setting, memory, usable_bytes
from shared.families.model_sizes import ModelSizes
from shared.families.registry import find_sizes
from tests.bench.scale.assumed import GPU_BYTES, Serving, engine_gpus, loop_of
from tests.bench.scale.sim_miniature import learner_setting, miniature
from tests.bench.scale.sim_records import Loop, Rule
from tests.bench.scale.simulation import simulate

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("tests/bench/scale/*.py", "learner/tickets/staleness.py")  # that make a row
EPISODES_A_GPU, MOST_EPISODES, GROUP_SIZE = 32, 8192, 8  # of a step
SIMULATED = 512  # of these, at most; more are simulated in miniature, but in the table of tails
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


@dataclass(frozen=True, slots=True)
class Parts:
    """What a case divides its GPUs into."""

    setting: Setting  # of the learner, with its GPUs
    engines: int
    fits: bool  # there is an engine, and a rank of the learner has room

    @staticmethod
    def of(case: Case, sizes: ModelSizes) -> Parts:
        episodes = min(EPISODES_A_GPU * case.gpus, MOST_EPISODES)
        setting = Setting(episodes=episodes, activation_checkpointing=True)
        of_engine = engine_gpus(sizes, setting)
        learner = case.gpus if case.share == 1 else of_engine * max(1, round(case.gpus * case.share / of_engine))
        engines = (case.gpus if case.share == 1 else case.gpus - learner) // of_engine
        setting = learner_setting(setting, learner)
        has_room = memory(sizes, setting).total <= usable_bytes(GPU_BYTES)
        return Parts(setting, engines, engines > 0 and has_room)


def loop(case: Case, sizes: ModelSizes) -> Loop:
    """Of so many GPUs. ValueError: they have no engine."""
    parts = Parts.of(case, sizes)
    made = loop_of(
        sizes, parts.setting, parts.engines, group_size=GROUP_SIZE, max_staleness=case.max_staleness,
        design=case.design, speed=Speed(), serving=Serving(sigma=case.sigma),  # type: ignore[arg-type]
    )  # fmt: skip
    sent = made.publication
    sent = replace(sent, send_s=sent.send_s * case.slower, handover_s=sent.handover_s * case.slower)
    return replace(made, publication=sent, rule=case.rule)


def fitting(model: str, gpus: list[int]) -> list[Case]:
    """The cases that have an engine and a learner that fits; a line on stderr for each number of GPUs that has none.
    ValueError: an unknown model, or no case is left."""
    if wrong := [count for count in gpus if count < 1]:
        raise ValueError(f"--gpus {wrong[0]} is no number of GPUs; use 1 or more")
    found = [case for case in cases(model, sorted(set(gpus))) if Parts.of(case, find_sizes(case.model)).fits]
    left = {case.gpus for case in found if case.model == model}
    none = [f"{count}" for count in sorted(set(gpus) - left)]
    said = f"--gpus {' '.join(none)}: no engine and learner of {model} fit; use more GPUs"
    if not left:
        raise ValueError(said)
    if none:
        print(said, file=sys.stderr, flush=True)
    return found


@cache
def _source() -> bytes:
    return b"".join(path.read_bytes() for pattern in SOURCES for path in sorted(ROOT.glob(pattern)))


def code_of(whole: Loop) -> str:
    """A short hash of all that a row comes from beside its case: the simulation's source, and the loop's numbers, which
    are those of the model and of what is assumed."""
    return hashlib.sha256(_source() + repr((whole, SIMULATED, STEPS, MOST_SKIP)).encode()).hexdigest()[:12]


def row_of(case: Case, whole: Loop, seed: int = 0) -> Row:
    """By simulation."""
    skip = min(MOST_SKIP, case.max_staleness + 1)
    small, times = (whole, 1.0) if case.kind == "tails" else miniature(whole, SIMULATED)
    outcome = simulate(small, STEPS + skip, skip=skip, seed=seed)
    row = {**asdict(outcome), "most_stale": outcome.max_staleness, **asdict(case)}
    row["episodes_per_s"] = outcome.episodes_per_s * times
    return row


def _kept(path: Path) -> list[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError):
        raise ValueError(f"--rows {path} holds lines that are no rows of this command; name another file") from None


def sweep(model: str, gpus: list[int], kept: Path) -> list[Row]:
    """A row a case; those that `kept` holds of the same code are not made again. ValueError: as `fitting`; or `kept`
    holds something else."""
    found, known = fitting(model, gpus), _kept(kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in found:
        whole = loop(case, find_sizes(case.model))
        key = {**asdict(case), "code": code_of(whole)}
        row = next((row for row in known if key.items() <= row.items()), None)
        if row is None:
            row = {**row_of(case, whole), **key}
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
        rows.append(row)
    return rows
