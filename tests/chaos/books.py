"""The books of a chaos run: what is broken, since when, and when it is whole again."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tests.chaos.report import Recovery
from tests.chaos.system import System

RECOVER_WITHIN_S = 300.0
TICK_S = 0.1
LEARNER = ("learner", 0)
DISK = ("disk", 0)


@dataclass(slots=True)
class Waiting:
    """What is not whole again. `of`: the part of the system that is broken, or None."""

    name: str
    of: tuple[str, int] | None
    since: float
    whole: Callable[[], bool]
    learner_away: bool = False


@dataclass(order=True, slots=True)
class Later:
    due: float
    number: int
    action: Callable[[], object] = field(compare=False)


class Books:
    """Of what was broken, and how long it took until it was whole again; and what is to be done later."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.recovered: defaultdict[str, list[Recovery]] = defaultdict(list)
        self.given_up: list[str] = []
        self.waiting: list[Waiting] = []
        self.later: list[Later] = []
        self._numbers = count()

    # ------------------------------------------------------------------ time

    def start(self) -> None:
        """Until the first trained step."""
        self.wait("start", None, self.a_step_after(lambda: True))
        while self.waiting:
            self.tick()
            time.sleep(TICK_S)

    def tick(self) -> None:
        while self.later and self.later[0].due <= time.monotonic():
            heapq.heappop(self.later).action()
        self.system.tend()
        away, now = self.broken(LEARNER), time.monotonic()
        for waiting in list(self.waiting):
            waiting.learner_away |= away and waiting.of != LEARNER
            if waiting.whole():
                self.recovered[waiting.name].append(Recovery(now - waiting.since, waiting.learner_away))
            elif now - waiting.since > RECOVER_WITHIN_S:
                self.given_up.append(f"{waiting.name}, {now - waiting.since:.0f} s")
            else:
                continue
            self.waiting.remove(waiting)

    def wait(self, name: str, of: tuple[str, int] | None, whole: Callable[[], bool]) -> None:
        self.waiting.append(Waiting(name, of, time.monotonic(), whole))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self.later, Later(time.monotonic() + seconds, next(self._numbers), action))

    def broken(self, part: tuple[str, int]) -> bool:
        return any(waiting.of == part for waiting in self.waiting)

    # ------------------------------------------------------------------ being whole again

    def a_step_after(self, ready: Callable[[], bool]) -> Callable[[], bool]:
        """A step that was trained later than `ready` was true for the first time."""
        steps: list[int] = []

        def whole() -> bool:
            if not steps and ready():
                steps.append(len(self.system.rows()))
            return bool(steps) and len(self.system.rows()) > steps[0]

        return whole

    def a_step_of_new_ranks(self) -> Callable[[], bool]:
        old = set(self.system.members("learner").values())

        def ready() -> bool:
            ranks = set(self.system.members("learner").values())
            return len(ranks) == 2 and not ranks & old

        return self.a_step_after(ready)

    def serves(self, slot: int) -> bool:
        """Whether an engine holds the weights of the last step, or of the one before."""
        return (self.system.weights_of(slot) or -1) >= self.system.rows()[-1]["policy_version"] - 1
