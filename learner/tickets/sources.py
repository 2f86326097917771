"""The sources of training samples. A sample is a pure function of its position in the run, so the dataset cursor is one
integer; `learner.tickets.pools` draws from them by what samples have earned, with a cursor for each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from msgspec.structs import replace

from learner.tickets.interleave import Interleave
from shared.types import Sample


class SampleSource(Protocol):
    """An endless sequence of training samples; the same position always gives the same sample."""

    def sample(self, position: int) -> Sample:
        """Return the sample at a position of the run."""
        ...


class RoundSource(SampleSource, Protocol):
    """A source whose samples come again and again, in rounds of `size` positions."""

    @property
    def size(self) -> int:
        """The number of samples."""
        ...

    def index(self, position: int) -> int:
        """Return which of the samples, from 0, is at a position of the run."""
        ...


@dataclass(frozen=True, slots=True)
class SeedSource:
    """Samples that are made from the seeds `first`, `first` + 1, ..., starting again after `count` seeds.

    If there are `variants`, consecutive seeds cycle through them; each becomes the sample's `env_config`. `task`: the
    name of the samples' task, `held_out`: of their held-out set.
    """

    first: int = 0
    count: int = 1_000_000_000
    prompt: tuple[dict[str, Any], ...] = ()
    split: str = ""
    variants: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    task: str = ""
    held_out: str = ""

    @property
    def size(self) -> int:
        return self.count

    def index(self, position: int) -> int:
        return position % self.count

    def sample(self, position: int) -> Sample:
        seed = self.first + self.index(position)
        metadata: dict[str, Any] = {"seed": seed} | ({"split": self.split} if self.split else {})
        if self.variants:
            metadata["env_config"] = self.variants[seed % len(self.variants)]
        return named(Sample(f"seed-{seed}", self.prompt, metadata=metadata, tools=self.tools), self.task, self.held_out)


def named(sample: Sample, task: str, held_out: str = "") -> Sample:
    """Return the sample as one of a task, whose name then begins its id, and of a held-out set."""
    sample_id = f"{task}/{sample.id}" if task else sample.id
    return replace(sample, id=sample_id, task=task, held_out=held_out) if task or held_out else sample


class ListSource:
    """A dataset in memory, shuffled anew in each epoch; the order depends only on `seed` and the epoch."""

    def __init__(self, samples: Sequence[Sample], seed: int = 0) -> None:
        if not samples:
            raise ValueError("the dataset has no samples; check data.source")
        self.samples = samples
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    @property
    def size(self) -> int:
        return len(self.samples)

    def sample(self, position: int) -> Sample:
        return self.samples[self.index(position)]

    def index(self, position: int) -> int:
        epoch, index = divmod(position, len(self.samples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.samples)))
            Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[index]


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The training samples of one task, and the task's share of the groups, relative to the others'."""

    name: str
    source: RoundSource
    weight: float = 1.0


class MixedSource:
    """The samples of several tasks in turns, each task's share by its weight. The n-th turn of a task is position n of
    its own source."""

    def __init__(self, tasks: Sequence[TaskSource]) -> None:
        self.tasks = tuple(tasks)
        self._turns = Interleave([task.weight for task in tasks])

    def sample(self, position: int) -> Sample:
        task, turn = self._turns.turn(position)
        return self.tasks[task].source.sample(turn)
