"""Whether what is trained is what was issued: episodes compared at each stage by length, turns, reward, difficulty.

A system that loses long episodes, or trains on them less often, teaches the policy to be brief. The meter counts
episodes that were issued, that finished, that were dropped and that were trained on since the process began; episodes
that are still open make the difference between the counts.
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
        self.count += times
        self.total += times * value
        self.squares += times * value * value

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.count - self.mean * self.mean))  # a power would raise


class SelectionMeter:
    """Episodes by stage and property. The difficulty is the number `difficulty` of a sample's metadata, if it has one;
    `group_s` is the time its whole group took to play."""

    def __init__(self) -> None:
        self.episodes = dict.fromkeys(STAGES, 0)
        self._moments = {stage: {name: Moments() for name in PROPERTIES} for stage in STAGES}

    def issued(self, ticket: Ticket) -> None:
        self._count("issued", ticket, ticket.group_size)

    def add(self, stage: str, ticket: Ticket, group: Group) -> None:
        """A group that finished, was dropped or is trained on."""
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
        """Mean of what is trained minus mean of what came first, in standard deviations of the latter. What came first
        is what was issued for the difficulty, and what finished for all that is not known before."""
        first = self._moments["issued" if name == "difficulty" else "finished"][name]
        trained = self._moments["trained"][name]
        if not first.count or not trained.count or not first.deviation:
            return 0.0
        return (trained.mean - first.mean) / first.deviation

    def metrics(self) -> dict[str, float]:
        """Only what has been seen."""
        values = {f"selection/episodes/{stage}": float(count) for stage, count in self.episodes.items()}
        for name in PROPERTIES:
            means = {
                f"selection/{s}/{name}": self._moments[s][name].mean for s in STAGES if self._moments[s][name].count
            }
            values |= {f"selection/shift/{name}": self.shift(name), **means} if means else {}
        return values

    def table(self) -> str:
        """Markdown: a row for each stage, the means of its episodes, and the shift."""
        head = ["| | episodes |" + "".join(f" {name} |" for name in PROPERTIES), "|---" * (2 + len(PROPERTIES)) + "|"]
        rows = [
            f"| {stage} | {self.episodes[stage]} |"
            + "".join(f" {m.mean:.4g} |" if m.count else " |" for m in self._moments[stage].values())
            for stage in STAGES
        ]
        shift = "| trained against first, in standard deviations | |"
        return "\n".join([*head, *rows, shift + "".join(f" {self.shift(name):+.3f} |" for name in PROPERTIES)])
