"""What happens to an engine's weights: another learner gives it some, or they do not come through."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial

from tests.chaos.learner_faults import Inject
from tests.chaos.recovery import LEARNER, Condition, Recoveries
from tests.chaos.sockets import between, cut, release, silence
from tests.chaos.system import MODEL, System

STRANGER_ENDS_S = 60.0


class EngineFaults:
    """Each breaks one engine, while the learner is there."""

    def __init__(self, system: System, recoveries: Recoveries, rng: random.Random) -> None:
        self.system, self.recoveries, self.random = system, recoveries, rng
        self.all: Mapping[str, tuple[int, Inject]] = {  # weight and action
            "engine rolled back": (2, self.roll_back),
            "engine given weights that are not finite": (2, self.give_not_finite),
            "weights' line delayed": (2, partial(self.break_weights_line, "delayed")),
            "weights' line cut": (2, partial(self.break_weights_line, "cut")),
            "weights' line half-open": (2, partial(self.break_weights_line, "half-open")),
        }

    def intact(self) -> tuple[int, int] | None:
        """Slot and process id of an engine that no fault has broken."""
        broken = self.recoveries.is_broken
        if broken(LEARNER):
            return None
        running = self.system.members("engine").items()
        return self.random.choice([each for each in running if not broken(("engine", each[0]))] or [None])

    def roll_back(self, name: str) -> bool:
        """An engine is given the weights that the run began with, as a learner would whose process was stopped then."""
        first = self.system.first_process()
        return bool(first) and self.intrude(name, f"0-{first}", may_succeed=True)

    def give_not_finite(self, name: str) -> bool:
        """Under the name that the engine expects: it must refuse them."""
        newest = self.system.published()
        return bool(newest) and self.intrude(name, newest, "--not-finite")

    def intrude(self, name: str, called: str, *more: str, may_succeed: bool = False) -> bool:
        if not (engine := self.intact()):
            return False
        url, began = f"http://127.0.0.1:{self.system.engine_port + engine[0]}", time.monotonic()
        command = [sys.executable, "-m", "tests.chaos.publisher", "--engine", url, "--model", MODEL, "--name", called]
        stranger = subprocess.Popen([*command, *more], stdout=self.system.log, stderr=self.system.log)

        def ended() -> bool:
            if stranger.poll() is None and time.monotonic() - began > STRANGER_ENDS_S:
                stranger.kill()
                stranger.wait()
            if stranger.poll() == 0 and not may_succeed:
                self.recoveries.blame(f"{name}: it took them")
            return stranger.poll() is not None

        served = self.served_after_a_step(engine[0], self.recoveries.a_step_after(ended))
        self.recoveries.expect(name, ("engine", engine[0]), served)
        return True

    def break_weights_line(self, how: str, name: str) -> bool:
        """The connections over which weights are broadcast, at one of their ends. A half-open one stays so."""
        engine, rank = self.intact(), self.system.members("learner").get(0)
        if engine is None or rank is None:
            return False
        seconds = self.random.uniform(1.0, 4.0) if how == "delayed" else 0.0
        lines = between(*self.random.sample((rank, engine[1]), 2))
        if not (cut(lines) if how == "cut" else silence(lines)):
            return False
        if seconds:
            self.recoveries.after(seconds, partial(release, lines))
        over = time.monotonic() + seconds
        first = self.recoveries.a_step_after(lambda: time.monotonic() > over)  # its weights may have been on their way
        second = self.recoveries.a_step_after(first)
        self.recoveries.expect(name, ("engine", engine[0]), self.served_after_a_step(engine[0], second))
        return True

    def served_after_a_step(self, slot: int, trained: Condition) -> Condition:
        return lambda: trained() and self.recoveries.serves(slot)
