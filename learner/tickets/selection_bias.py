"""Whether the trained episodes are a fair selection of the issued ones.

Episodes are compared at each stage by length, turns, reward, playing time and difficulty. A system that loses long
episodes, or trains on them less often, teaches the policy to be brief. The meter counts the episodes that were issued,
finished, dropped and trained on since the process began; the counts differ by the episodes that are still open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shared.types import Group, Ticket

STAGES = ("issued", "finished", "dropped", "trained")
PROPERTIES = ("tokens", "turns", "reward", "group_s", "difficulty")


@dataclass
class Moments:
    """Count, mean and standard deviation of numbers that come one at a time."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a number `times` times."""
        self.count += times
        self.total += times * value
        self.squares += times * value * value

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def deviation(self) -> float:
        # A product, since a power raises OverflowError for large values.
        return math.sqrt(max(0.0, self.squares / self.count - self.mean * self.mean))


class SelectionMeter:
    """Moments of the episodes' properties by stage. `difficulty` is the number of that name in a sample's metadata, if
    it has one; `group_s` is the time that playing the whole group took."""

    def __init__(self) -> None:
        self.episodes = dict.fromkeys(STAGES, 0)
        self._moments = {stage: {name: Moments() for name in PROPERTIES} for stage in STAGES}

    def add_issued(self, ticket: Ticket) -> None:
        """Count the episodes of a new ticket."""
        self._count("issued", ticket, ticket.group_size)

    def add(self, stage: str, ticket: Ticket, group: Group) -> None:
        """Count the episodes of a group that finished, was dropped or is trained on, and record their properties."""
        self._count(stage, ticket, len(group.trajectories))
        moments = self._moments[stage]
        for t in group.trajectories:
            moments["tokens"].add(float(np.count_nonzero(t.loss_mask)))
            moments["turns"].add(float(len(t.turns)))
            moments["reward"].add(t.reward)
        moments["group_s"].add(group.played_s, len(group.trajectories))

    def _count(self, stage: str, ticket: Ticket, episodes: int) -> None:
        self.episodes[stage] += episodes
        difficulty = ticket.sample.metadata.get("difficulty")
        if isinstance(difficulty, int | float):
            self._moments[stage]["difficulty"].add(float(difficulty), episodes)

    def shift(self, name: str) -> float:
        """Return the mean over trained episodes minus the mean at the first stage, in standard deviations of the first
        stage.

        The first stage is `issued` for the difficulty, and `finished` for the properties that are not known before.
        """
        first = self._moments["issued" if name == "difficulty" else "finished"][name]
        trained = self._moments["trained"][name]
        if not first.count or not trained.count or not first.deviation:
            return 0.0
        return (trained.mean - first.mean) / first.deviation

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all stages, and of the properties that have values."""
        values = {f"selection/episodes/{stage}": float(count) for stage, count in self.episodes.items()}
        for name in PROPERTIES:
            means = {
                f"selection/{s}/{name}": self._moments[s][name].mean for s in STAGES if self._moments[s][name].count
            }
            values |= {f"selection/shift/{name}": self.shift(name), **means} if means else {}
        return values

    def table(self) -> str:
        """Return a Markdown table: for each stage a row with the means of its episodes, then a row with the shifts."""
        head = ["| | episodes |" + "".join(f" {name} |" for name in PROPERTIES), "|---" * (2 + len(PROPERTIES)) + "|"]
        rows = [
            f"| {stage} | {self.episodes[stage]} |"
            + "".join(f" {m.mean:.4g} |" if m.count else " |" for m in self._moments[stage].values())
            for stage in STAGES
        ]
        shift = "| trained against first, in standard deviations | |"
        return "\n".join([*head, *rows, shift + "".join(f" {self.shift(name):+.3f} |" for name in PROPERTIES)])
