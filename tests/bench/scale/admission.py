"""The ticket book's rules (`learner.tickets.staleness`) for groups that have a number only."""

from __future__ import annotations

import heapq
from collections import Counter

from learner.tickets.staleness import leaves_room, may_issue
from tests.bench.scale.sim_records import Loop


class Admission:
    """What may be played and what is trained on next: as `TicketBook` says, or one batch beside the one in training.

    `version` is that of the learner, `served` the one that all engines hold; they differ while relays send."""

    def __init__(self, loop: Loop, total_groups: int | None = None) -> None:
        self.version = self.served = 0
        self.issued = self.trained = 0
        self._loop, self._total = loop, total_groups
        self._ready: list[int] = []  # a heap
        self._playing: set[int] = set()
        self._version_of: dict[int, int] = {}  # of open tickets, at their issue
        self._open_by_version: Counter[int] = Counter()

    @property
    def playing(self) -> int:
        """Groups that are issued and not here."""
        return len(self._playing)

    def may_issue(self) -> bool:
        loop = self._loop
        if self._total is not None and self.issued >= self._total:
            return False
        if loop.rule == "one_step_off":
            return self.issued < self.trained + loop.groups_per_step
        return may_issue(self.issued, 0, self.served, loop.max_staleness, loop.groups_per_version)

    def issue(self) -> int:
        """The number of a new ticket."""
        number, self.issued = self.issued, self.issued + 1
        self._version_of[number] = self.served
        self._playing.add(number)
        self._open_by_version[self.served] += 1
        return number

    def is_open(self, number: int) -> bool:
        """Whether a group of this ticket would still be taken."""
        return number in self._playing

    def arrived(self, number: int) -> None:
        self._playing.remove(number)
        heapq.heappush(self._ready, number)

    def take(self) -> list[int] | None:
        """The groups of a step, oldest first, where there are enough and nothing becomes too old by it."""
        loop = self._loop
        if len(self._ready) < loop.groups_per_step:
            return None
        batch = heapq.nsmallest(loop.groups_per_step, self._ready)
        if loop.rule == "tickets":
            others = self._open_by_version - Counter(self._version_of[number] for number in batch)
            trained = self.trained + len(batch)
            if not leaves_room(others, trained, self.version, loop.max_staleness, loop.groups_per_version):
                return None
        for number in batch:
            heapq.heappop(self._ready)
            self._open_by_version[self._version_of.pop(number)] -= 1
        self._open_by_version = +self._open_by_version
        self.trained += len(batch)
        return batch
