"""The difference between the engines' and the learner's logprobs over recorded episodes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.recordings.episode_format import ColumnName, RecordedEpisode

WORST = 10  # tokens with the largest gaps that are listed
ENDLESS = 1e30
SAME = {"float32": 1e-4, "bfloat16": 0.03}
"""Mean gaps up to which engine and learner compute the same model, by its dtype."""


@dataclass(slots=True)
class Gap:
    """The absolute difference of the learner's and the engine's logprobs over some tokens: count, sum and maximum."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, gaps: np.ndarray) -> None:
        if len(gaps):
            self.tokens += len(gaps)
            self.total += float(gaps.sum(dtype=np.float64))
            self.largest = max(self.largest, float(gaps.max()))

    def as_dict(self) -> dict[str, float]:
        return {"tokens": self.tokens, "mean": self.total / max(self.tokens, 1), "max": self.largest}


@dataclass(frozen=True, slots=True)
class BadToken:
    """A token for which the logprobs of learner and engine differ."""

    episode: str
    step: int
    turn: int  # from 1
    place: int  # index in the unexpanded token stream
    version: int
    text: str
    behaviour: float
    learner: float

    @property
    def gap(self) -> float:
        return abs(self.learner - self.behaviour)


@dataclass(slots=True)
class Mismatch:
    """The gaps over all added episodes. A gap that is not finite counts as ENDLESS."""

    episodes: int = 0
    gap: Gap = field(default_factory=Gap)
    by_turn: dict[int, Gap] = field(default_factory=lambda: defaultdict(Gap))
    by_version: dict[int, Gap] = field(default_factory=lambda: defaultdict(Gap))
    worst: list[BadToken] = field(default_factory=list)
    recorded: dict[ColumnName, float] = field(default_factory=dict)  # largest difference from the run's own record

    def add(self, episode: RecordedEpisode, step: int, columns: dict[ColumnName, np.ndarray]) -> None:
        """Add an episode. `columns`: its recomputed columns, [K] each."""
        positions = np.flatnonzero(episode.loss_mask.numpy() == 1)
        behaviour = episode.behaviour_logprobs.numpy()[positions]
        versions = episode.policy_versions.numpy()[positions]
        gaps = np.nan_to_num(np.abs(columns["logprob"] - behaviour), nan=ENDLESS, posinf=ENDLESS)
        turns = np.searchsorted([turn.end for turn in episode.turns], positions, side="right") + 1
        self.episodes += 1
        self.gap.add(gaps)
        for groups, numbers in ((self.by_turn, turns), (self.by_version, versions)):
            for number in np.unique(numbers).tolist():
                groups[number].add(gaps[numbers == number])
        for i in np.argsort(-gaps)[:WORST].tolist():
            place = int(positions[i])
            text = episode.pieces[place] if episode.pieces else f"token {episode.token_ids.numpy()[place]}"
            values = float(behaviour[i]), float(columns["logprob"][i])
            self.worst.append(BadToken(episode.id, step, int(turns[i]), place, int(versions[i]), text, *values))
        self.worst = sorted(self.worst, key=lambda token: -token.gap)[:WORST]
        for name, array in episode.columns.items():
            if name in columns:
                apart = np.nan_to_num(np.abs(array.numpy().astype(float) - columns[name]), nan=ENDLESS, posinf=ENDLESS)
                self.recorded[name] = max(self.recorded.get(name, 0.0), float(apart.max(initial=0.0)))

    def as_dict(self) -> dict[str, Any]:
        return {
            "episodes": self.episodes,
            "gap": self.gap.as_dict(),
            "by_turn": {str(turn): gap.as_dict() for turn, gap in sorted(self.by_turn.items())},
            "by_version": {str(version): gap.as_dict() for version, gap in sorted(self.by_version.items())},
            "worst": [
                {name: getattr(token, name) for name in (*BadToken.__dataclass_fields__, "gap")} for token in self.worst
            ],
            "recorded": dict(self.recorded),
        }

    def verdict(self, version: int | None, dtype: str) -> str:
        """Return in one line whether engine and learner computed the same model. `version`: that of the weights which
        were replayed; None if it is not known."""
        if version is None or version not in self.by_version:
            weights = "these weights, whose version is not known" if version is None else f"version {version}"
            has = ", ".join(map(str, sorted(self.by_version)))
            return (
                f"no verdict: no token was sampled from {weights}, but from {has}; replay a step beside its checkpoint"
            )
        gap, limit = self.by_version[version], SAME[dtype]
        mean = gap.as_dict()["mean"]
        if mean <= limit:
            return f"the same model: {mean:.1e} at version {version}"
        return f"NOT the same model: {mean:.1e} at version {version}, expected at most {limit:g} in {dtype}"

    def lines(self) -> list[str]:
        """Return the comparison as lines of text."""
        lines = [f"{self.episodes} episodes, {self.gap.tokens} sampled tokens: |learner - engine| logprob"]
        lines.append(f"{'':>12} {'tokens':>8} {'mean':>10} {'max':>10}")
        rows = [("all", self.gap)]
        rows += [(f"turn {turn}", gap) for turn, gap in sorted(self.by_turn.items())]
        rows += [(f"version {version}", gap) for version, gap in sorted(self.by_version.items())]
        for name, gap in rows:
            lines.append(f"{name:>12} {gap.tokens:>8} {gap.as_dict()['mean']:>10.2e} {gap.largest:>10.2e}")
        lines.append("worst tokens:")
        for t in self.worst:
            lines.append(
                f"  {t.gap:.2e}  {t.text!r}: engine {t.behaviour:.4f}, learner {t.learner:.4f}, version {t.version}, "
                f"turn {t.turn} of {t.episode}, step {t.step}"
            )
        if self.recorded:
            differences = ", ".join(f"{name} {value:.1e}" for name, value in self.recorded.items())
            lines.append(f"largest difference to what the run itself computed: {differences}")
        return lines
