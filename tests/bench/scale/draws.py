"""Distributions of positive quantities: given ones by their mean and the weight of their tail, and measured ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log
from random import Random
from typing import NamedTuple, Protocol


class Draw(Protocol):
    @property
    def mean(self) -> float: ...

    def draw(self, random: Random) -> float: ...


@dataclass(frozen=True, slots=True)
class Constant:
    mean: float

    def draw(self, random: Random) -> float:
        return self.mean


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp of a normal variable with deviation `sigma`, cut at `most`. Its 99th percentile is exp(2.33 sigma) times its
    median: 10 times at sigma 1. `mean`: before the cut."""

    mean: float
    sigma: float
    most: float = inf

    def draw(self, random: Random) -> float:
        return min(self.most, exp(random.gauss(log(self.mean) - self.sigma**2 / 2, self.sigma)))


@dataclass(frozen=True, slots=True)
class Pareto:
    """P(X > x) = (least / x)^alpha for `alpha` > 1, cut at `most`; without, its variance is infinite up to 2. `mean`:
    before the cut."""

    mean: float
    alpha: float
    most: float = inf

    def draw(self, random: Random) -> float:
        return min(self.most, self.mean * (self.alpha - 1) / self.alpha * random.paretovariate(self.alpha))


@dataclass(frozen=True, slots=True)
class Measured:
    """Values that were seen, each as likely as the others."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def draw(self, random: Random) -> float:
        return random.choice(self.values)


class TurnSize(NamedTuple):
    prompt_tokens: float  # that the engine has not read yet
    tokens: float  # that it samples
    env_s: float  # until the next turn can begin


class Episodes(Protocol):
    def draw(self, random: Random) -> tuple[TurnSize, ...]: ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """Episodes of independent sizes; all turns of one are equally long, so that a long episode is long in each."""

    turns: Draw  # rounded, one at least
    prompt_tokens: Draw  # of an episode
    tokens: Draw  # of an episode, one a turn at least
    env_s: Draw  # of a turn

    def draw(self, random: Random) -> tuple[TurnSize, ...]:
        count = max(1, round(self.turns.draw(random)))
        prompt, tokens = self.prompt_tokens.draw(random) / count, max(1.0, self.tokens.draw(random) / count)
        return tuple(TurnSize(prompt, tokens, self.env_s.draw(random)) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Seen:
    """Whole episodes that were recorded, each as likely as the others."""

    episodes: tuple[tuple[TurnSize, ...], ...]

    def draw(self, random: Random) -> tuple[TurnSize, ...]:
        return random.choice(self.episodes)
