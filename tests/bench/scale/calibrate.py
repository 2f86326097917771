"""The distributions of one run, from its recordings and its metrics.jsonl, as a loop that can be simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shared.recordings.episode_format import RecordedEpisode
from shared.recordings.reader import FOLDER, read_step, steps
from tests.bench.scale.draws import Measured, Seen, TurnSize
from tests.bench.scale.sim_records import EngineSpeed, Loop, Publication

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of a recorded episode: seconds of the actor's clock, and tokens that were sampled."""

    begin: float
    generate_s: float
    tokens: int


def rows_of(folder: Path) -> list[Row]:
    """The rows of a run's steps."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "rollout/reward" in row]


def episodes_of(folder: Path) -> list[tuple[int, RecordedEpisode]]:
    """All recorded episodes whose turns tell their seconds, each with its step."""
    found = []
    for path in steps(folder / FOLDER):
        step = read_step(path)
        found += [(step.header.step, step.episode(summary)) for summary in step.summaries]
    return [(step, episode) for step, episode in found if episode.turns and episode.started]


def asked(episode: RecordedEpisode) -> list[Asked]:
    return [Asked(episode.started + t.begin_s, t.generate_s, t.end - t.start) for t in episode.turns]


def sizes(episode: RecordedEpisode) -> tuple[TurnSize, ...]:
    """What is between two turns is the environment's; what was before the first comes after the last, so that the
    actor's place is taken for as long."""
    turns = episode.turns
    between = [after.begin_s - turn.begin_s - turn.generate_s for turn, after in pairwise(turns)]
    between.append(turns[-1].env_s + turns[0].begin_s)
    tokens = [float(turn.end - turn.start) for turn in turns]
    return tuple(TurnSize(1.0, n, max(0.0, s)) for n, s in zip(tokens, between, strict=True))


def beside(turns: Sequence[Asked]) -> np.ndarray:
    """float64 [n, 3]: of each turn its tokens, these times the mean number of turns under way, itself included, and the
    number of turns that began while it was, likewise."""
    begin = np.array([turn.begin for turn in turns])
    end = begin + np.array([turn.generate_s for turn in turns])
    rows = []
    for turn in turns:
        low, high = turn.begin, turn.begin + max(turn.generate_s, 1e-9)
        overlap = np.clip(np.minimum(end, high) - np.maximum(begin, low), 0.0, None).sum() / (high - low)
        rows.append((turn.tokens, turn.tokens * overlap, ((begin >= low) & (begin < high)).sum()))
    return np.array(rows, np.float64)


def speed_of(turns: Sequence[Asked], max_batch: int, before: Sequence[Asked] = ()) -> EngineSpeed:
    """Least squares of `generate_s = tokens (token_s + running request_s) + arrivals turn_s`, none of them negative.
    `before`: other turns, which the engine had beside these."""
    columns = beside([*turns, *before])[: len(turns)]
    seconds = np.array([turn.generate_s for turn in turns])
    best, least = np.zeros(3), float("inf")
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)[0]
            error = float(((columns[:, chosen] @ found - seconds) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    token_s, request_s, turn_s = best.tolist()
    return EngineSpeed(token_s=token_s, request_s=request_s, turn_s=turn_s, max_batch=max_batch)


def loop_from(folder: Path, skip: int, *, groups_per_step: int, groups_in_play: int, max_batch: int) -> Loop:
    """Of a run with one engine and one episode a group, without its first `skip` steps. ValueError: nothing of it was
    recorded."""
    rows, recorded = rows_of(folder)[skip:], episodes_of(folder)
    episodes = [episode for step, episode in recorded if step > skip]
    turns = [turn for episode in episodes for turn in asked(episode)]
    before = [turn for step, episode in recorded if step <= skip for turn in asked(episode)]
    if not rows or not episodes:
        raise ValueError(f"{folder} has {len(rows)} steps and {len(episodes)} recorded episodes to measure by")
    published = [row["publish/seconds"] for row in rows]
    pauses = [min(row.get("publish/pause_s", 0.0), row["publish/seconds"]) for row in rows]
    load_s = float(np.mean(pauses))
    trained = [max(0.0, r["time/step_s"] - r["time/idle_s"] - r["publish/seconds"]) for r in rows]
    return Loop(
        episodes=Seen(tuple(sizes(episode) for episode in episodes)),
        engine=speed_of(turns, max_batch, before),
        publication=Publication("staged", float(np.mean(published)) - load_s, load_s),
        step_s=Measured(tuple(trained)),
        groups_per_step=groups_per_step,
        groups_in_play=groups_in_play,
    )
