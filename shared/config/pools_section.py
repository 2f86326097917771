"""The list `pools` of a recipe: how often samples are drawn, by the rewards that they have earned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from shared.config.sections import NAME, Section

KEPT = 2**16
"""Samples whose mean reward is known at once; with more, those that were played longest ago are forgotten."""


class PoolConfig(Section):
    """The samples whose running mean reward lies within bounds."""

    name: str = Field(..., pattern=NAME, description="its name in metrics: letters, digits, - _ and .")
    bounds: tuple[float, float] = Field(
        ...,
        description="mean rewards of its samples, from the first to below the second; the lowest and the highest "
        "pool also have what lies beyond",
    )
    weight: float = Field(
        1.0, description="share of its turns in which a sample of it is played; 1 = always, as samples not played yet"
    )

    @model_validator(mode="after")
    def _may_be_drawn(self) -> Self:
        low, high = self.bounds
        if low >= high:
            raise ValueError(
                f"pool {self.name!r} has bounds = [{low:g}, {high:g}], between which there is no reward: it is empty; "
                "write the smaller one first, or leave the pool out"
            )
        if not 0 < self.weight <= 1:
            raise ValueError(
                f"pool {self.name!r} has weight = {self.weight:g}: give it one above 0, since a sample that is never "
                "played is never measured again, and at most 1"
            )
        return self


def check_pools(pools: Sequence[PoolConfig]) -> None:
    """Raise ValueError if bounds overlap or leave a gap."""
    ordered = sorted(pools, key=lambda pool: pool.bounds)
    for below, above in pairwise(ordered):
        end, start = below.bounds[1], above.bounds[0]
        if end == start:
            continue
        what = "overlap" if end > start else "leave a gap"
        raise ValueError(
            f"pools {below.name!r} and {above.name!r} {what}: one ends at {end:g}, the other begins at {start:g}; let "
            "each begin where the one below it ends"
        )
