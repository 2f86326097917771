"""Difficulty pools: samples are drawn by the mean reward that they have earned. No sockets or threads.

    ticket 7 ─▶ its task's next sample ─▶ is it the sample's turn? ─▶ the ticket's sample
                     ▲                            │ no
                     └────────────────────────────┘

The samples of a task come in the order of its source; one that has been played before is skipped in a share of its
turns that its pool sets. Which turns follows from the seed, the task and the turn alone.

What an episode earned counts from a fixed place of the run on, whenever it came: the results of a version count for the
tickets that cannot be issued before the next version, at any timing. So the tickets of a run that goes on from a
checkpoint are those that it would have issued anyway.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from learner.tickets.sources import MixedSource, TaskSource
from shared.config.pools_section import KEPT, PoolConfig
from shared.types import Group, PolicyVersion, Sample

MEMORY = 4
"""Plays over which a sample's mean reaches: the policy that earned older rewards is another one by now."""
MAX_SKIPS = 1000
"""Samples that are skipped for one ticket, at most, however seldom they are drawn."""


class SampleKey(NamedTuple):
    """A sample: the number of its task, and its row in the task's source."""

    task: int
    row: int


class DrawnSample(NamedTuple):
    """The sample of a ticket: the number of its task, and its position in the task's source."""

    task: int
    position: int


@dataclass(slots=True)
class RunningMean:
    """The mean reward of the last plays of a sample."""

    mean: float
    plays: int

    def add(self, reward: float) -> None:
        self.plays = min(self.plays + 1, MEMORY)
        self.mean += (reward - self.mean) / self.plays


class PoolTable:
    """The running mean reward of each sample that was played, for at most `kept` samples, and the pool that it is in.
    Results count from the version on that they are noted for."""

    def __init__(self, pools: Sequence[PoolConfig], kept: int = KEPT) -> None:
        self._pools = sorted(pools, key=lambda pool: pool.bounds)
        self._kept = kept
        self._means: dict[SampleKey, RunningMean] = {}  # the one played longest ago first
        self._waiting: deque[tuple[PolicyVersion, SampleKey, float]] = deque()

    def note(self, version: PolicyVersion, key: SampleKey, reward: float) -> None:
        """Note the mean reward of a sample's group, which counts from `version` on."""
        self._waiting.append((version, key, reward))

    def settle(self, version: PolicyVersion) -> None:
        """Count what counts from `version`, or from an earlier one."""
        while self._waiting and self._waiting[0][0] <= version:
            _, key, reward = self._waiting.popleft()
            mean = self._means.pop(key, None) or RunningMean(0.0, 0)
            mean.add(reward)
            self._means[key] = mean
            if len(self._means) > self._kept:
                del self._means[next(iter(self._means))]

    def pool_of(self, key: SampleKey) -> PoolConfig | None:
        """Return the pool that a sample is in; None for one that is not known."""
        known = self._means.get(key)
        return None if known is None else self._of_mean(known.mean)

    def _of_mean(self, mean: float) -> PoolConfig:
        return next((pool for pool in self._pools[:-1] if mean < pool.bounds[1]), self._pools[-1])

    def counts(self) -> dict[str, int]:
        """Return the number of known samples in each pool, by name."""
        found = Counter(self._of_mean(known.mean).name for known in self._means.values())
        return {pool.name: found[pool.name] for pool in self._pools}

    def state(self) -> dict[str, Any]:
        """Return plain JSON values."""
        means = [[*key, known.mean, known.plays] for key, known in self._means.items()]
        return {"means": means, "waiting": [[version, *key, reward] for version, key, reward in self._waiting]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a value of `state`."""
        self._means = {SampleKey(task, row): RunningMean(mean, plays) for task, row, mean, plays in state["means"]}
        self._waiting = deque(
            (version, SampleKey(task, row), reward) for version, task, row, reward in state["waiting"]
        )


class PooledSource(MixedSource):
    """The samples of one or several tasks in turns, drawn by pools."""

    def __init__(self, tasks: Sequence[TaskSource], pools: Sequence[PoolConfig], seed: int = 0) -> None:
        super().__init__(tasks)
        self.table = PoolTable(pools)
        self._seed = seed
        self._next = [0] * len(self.tasks)  # of each task: the position in its source that comes next
        self._drawn: dict[int, DrawnSample] = {}  # of each open ticket, by number
        self._skipped = 0

    def draw(self, number: int, version: PolicyVersion) -> Sample:
        """Return the sample of a ticket: the one that was drawn for it before, or a new one. Tickets without one are
        drawn for in the order of their numbers. `version`: results count that count from this version on, or from an
        earlier one."""
        if number not in self._drawn:
            self.table.settle(version)
            self._drawn[number] = self._draw(self._turns.turn(number)[0])
        drawn = self._drawn[number]
        return self.tasks[drawn.task].source.sample(drawn.position)

    def _draw(self, task: int) -> DrawnSample:
        source, start = self.tasks[task].source, self._next[task]
        end = start + min(source.size, MAX_SKIPS)
        # If none is drawn in a whole round, the next one is played whatever its pool.
        position = next((each for each in range(start, end) if not self._skips(task, each)), start)
        self._skipped += position - start
        self._next[task] = position + 1
        return DrawnSample(task, position)

    def _skips(self, task: int, position: int) -> bool:
        pool = self.table.pool_of(SampleKey(task, self.tasks[task].source.index(position)))
        if pool is None or pool.weight >= 1.0:
            return False
        return Random(f"{self._seed}/{task}/{position}").random() >= pool.weight

    def learn(self, number: int, group: Group, version: PolicyVersion) -> None:
        """Note what the group of an open ticket has earned; it counts from `version` on."""
        drawn = self._drawn.get(number)
        rewards = [t.reward for t in group.trajectories if t.trainable]
        if drawn is not None and rewards:
            key = SampleKey(drawn.task, self.tasks[drawn.task].source.index(drawn.position))
            self.table.note(version, key, math.fsum(rewards) / len(rewards))

    def close(self, number: int) -> None:
        """Forget which sample a ticket has: it is no longer open."""
        self._drawn.pop(number, None)

    def metrics(self) -> dict[str, float]:
        """Return the number of samples in each pool, and the number of turns that were skipped."""
        counts = {f"pools/{name}/samples": float(count) for name, count in self.table.counts().items()}
        return counts | {"pools/skipped": float(self._skipped)}

    def state(self) -> dict[str, Any]:
        """Return plain JSON values."""
        drawn = [[number, *each] for number, each in self._drawn.items()]
        return {"next": list(self._next), "drawn": drawn, "skipped": self._skipped} | self.table.state()

    def load_state(self, state: dict[str, Any] | None, issued: int, still_open: Iterable[int]) -> None:
        """Continue from a value of `state`. None: the run had no pools before; its first `issued` tickets, of which
        some are `still_open`, had samples in the order of their numbers."""
        if state is None:
            self._next = self._turns.counts(issued)
            self._drawn = {number: DrawnSample(*self._turns.turn(number)) for number in still_open}
            return
        self._next, self._skipped = list(state["next"]), state["skipped"]
        self._drawn = {number: DrawnSample(task, position) for number, task, position in state["drawn"]}
        self.table.load_state(state)
