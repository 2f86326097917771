"""Which parts of the system a fault has broken, and how long each takes to recover."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from tests.chaos.report import Recovery
from tests.chaos.system import System

RECOVER_WITHIN_S = 300.0
Part = tuple[str, int]  # an actor, engine, the learner or the disk, and its number
LEARNER: Part = ("learner", 0)
DISK: Part = ("disk", 0)
Condition = Callable[[], bool]


@dataclass(slots=True)
class Pending:
    """A recovery that is waited for. `part` is what the fault has broken, None for a fault that breaks no one part."""

    name: str
    part: Part | None
    since: float
    recovered: Condition
    learner_away: bool = False


class Recoveries:
    """Measures the time from each fault to what shows that the system has recovered from it."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.finished: defaultdict[str, list[Recovery]] = defaultdict(list)
        self.given_up: list[str] = []
        self.pending: list[Pending] = []
        self.scheduled: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()  # two actions that are due together need an order

    def tick(self) -> None:
        """Runs the scheduled actions that are due, and looks at each recovery that is waited for."""
        while self.scheduled and self.scheduled[0][0] <= time.monotonic():
            heapq.heappop(self.scheduled)[2]()
        self.system.supervise()
        learner_away, now = self.is_broken(LEARNER), time.monotonic()
        for pending in list(self.pending):
            pending.learner_away |= learner_away and pending.part != LEARNER
            if pending.recovered():
                self.finished[pending.name].append(Recovery(now - pending.since, pending.learner_away))
            elif now - pending.since > RECOVER_WITHIN_S:
                self.given_up.append(f"{pending.name}, {now - pending.since:.0f} s")
            else:
                continue
            self.pending.remove(pending)

    def expect(self, name: str, part: Part | None, recovered: Condition) -> None:
        self.pending.append(Pending(name, part, time.monotonic(), recovered))

    def expect_step_after(self, seconds: float, name: str, part: Part | None = None) -> bool:
        over = time.monotonic() + seconds
        self.expect(name, part, self.a_step_after(lambda: time.monotonic() > over))
        return True

    def blame(self, what: str) -> None:
        """Something has recovered otherwise than it may."""
        if what not in self.given_up:
            self.given_up.append(what)

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self.scheduled, (time.monotonic() + seconds, next(self._numbers), action))

    def is_broken(self, part: Part) -> bool:
        return any(pending.part == part for pending in self.pending)

    def a_step_after(self, ready: Condition) -> Condition:
        """True once a step is trained after `ready` was true for the first time."""
        steps: list[int] = []

        def trained() -> bool:
            if not steps and ready():
                steps.append(len(self.system.rows()))
            return bool(steps) and len(self.system.rows()) > steps[0]

        return trained

    def a_step_of_new_ranks(self) -> Condition:
        old = self.system.ranks()

        def ready() -> bool:
            ranks = self.system.ranks()
            return len(ranks) == 2 and not set(ranks) & set(old)

        return self.a_step_after(ready)

    def serves(self, slot: int) -> bool:
        """Whether an engine holds the weights that were published last, by their full name: an engine that holds a
        newer version of a dead learner, or the same number of one, does not serve."""
        return is_served(self.system.published(), self.system.weights_of(slot) or "")


def is_served(published: str, held: str) -> bool:
    """Whether these are the weights published last; or the next ones, which the ledger does not know of yet."""
    version, _, process = published.partition("-")
    return bool(process) and held in (published, f"{int(version) + 1}-{process}")
