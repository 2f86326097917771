"""Where training samples come from: a pure function of the position in the run, so a cursor is one integer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from shared.types import Sample


class SampleSource(Protocol):
    """The training samples in their order: endless, and the same sample for the same position, always."""

    def sample(self, position: int) -> Sample: ...


@dataclass(frozen=True, slots=True)
class SeedSource:
    """Samples made of seeds: `first`, `first` + 1, ..., again from `first` after `count` of them. Where there are
    `variants`, each seed has the next one as its `env_config`."""

    first: int = 0
    count: int = 1_000_000_000
    prompt: tuple[dict[str, Any], ...] = ()
    split: str = ""
    variants: tuple[dict[str, Any], ...] = ()

    def sample(self, position: int) -> Sample:
        seed = self.first + position % self.count
        metadata: dict[str, Any] = {"seed": seed} | ({"split": self.split} if self.split else {})
        if self.variants:
            metadata["env_config"] = self.variants[seed % len(self.variants)]
        return Sample(f"seed-{seed}", self.prompt, metadata=metadata)


class ListSource:
    """A dataset in memory, in a new order each epoch; the order depends on `seed` and the epoch alone."""

    def __init__(self, samples: Sequence[Sample], seed: int = 0) -> None:
        if not samples:
            raise ValueError("the dataset has no samples; check data.source")
        self._samples = samples
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def sample(self, position: int) -> Sample:
        epoch, index = divmod(position, len(self._samples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._samples)))
            Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._samples[self._order[index]]
