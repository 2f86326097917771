"""What happens to the learner: it is ended, comes back to a damaged checkpoint, or meets a second one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from learner.checkpoints.checkpoint_folder import step_of
from tests.chaos.disk import damage, newest
from tests.chaos.recovery import DISK, LEARNER, Recoveries
from tests.chaos.report import went_on_from
from tests.chaos.sockets import Line, between, cut, release, silence
from tests.chaos.system import System
from tests.support.machine import is_there

GONE_S = 10.0
SECOND_ENDS_S = 90.0
UNREACHED_S = 25.0
Inject = Callable[[str], bool]  # takes the fault's name; False = not possible now


class LearnerFaults:
    """All of them break the learner, so that there is one of them at a time."""

    def __init__(self, system: System, recoveries: Recoveries, rng: random.Random) -> None:
        self.system, self.recoveries, self.random = system, recoveries, rng
        self.all: Mapping[str, tuple[int, Inject]] = {  # weight and action
            "learner rank killed": (2, partial(self.end, self.kill_rank)),
            "learner killed": (1, partial(self.end, self.kill)),
            "learner preempted": (1, partial(self.end, lambda: system.learner.terminate())),
            "checkpoint damaged": (2, self.damage_checkpoint),
            "second learner": (2, self.start_another),
            "learner's weights not finite": (1, partial(self.spoil, "not finite")),
            "learner's step out of memory": (1, partial(self.spoil, "out of memory")),
            "learner goes back past an engine": (1, self.go_back_past_an_engine),
            "ranks' line delayed": (2, self.delay_ranks),
            "ranks' line cut": (1, self.cut_ranks),
            "ranks' line half-open": (1, self.forget_ranks),
        }

    def is_whole(self) -> bool:
        return len(self.system.ranks()) == 2 and not self.recoveries.is_broken(LEARNER)

    def kill(self) -> None:
        self.system.learner.kill()

    def kill_rank(self) -> None:
        os.kill(self.random.choice(self.system.ranks()), signal.SIGKILL)

    def end(self, end: Callable[[], object], name: str) -> bool:
        if not self.is_whole():
            return False
        self.recoveries.expect(name, LEARNER, self.recoveries.a_step_of_new_ranks())
        self.system.deaths.expect(self.system.ranks())
        end()
        return True

    def spoil(self, fault: str, name: str) -> bool:
        """The next step of one rank: see tests/chaos/learner.py. All ranks end, and start from the last checkpoint."""
        if not self.is_whole():
            return False
        pid = self.random.choice(self.system.ranks())
        self.end(lambda: (self.system.flags / f"{fault}-{pid}").touch(), name)
        return True

    def damage_checkpoint(self, name: str) -> bool:
        """The learner is killed, and before it is started again its newest checkpoint is damaged: it must go on from
        the one before, and train again what was trained since."""
        if not self.is_whole() or self.recoveries.is_broken(DISK) or not newest(self.system.run):
            return False
        ranks, again = self.system.ranks(), self.recoveries.a_step_of_new_ranks()
        self.system.deaths.expect(ranks)
        self.kill()
        wait_until_gone(ranks)
        (last, before), ledger = newest(self.system.run), self.system.run / "ledger.jsonl"
        what, since = damage(last, self.random), ledger.stat().st_size if ledger.exists() else 0
        aside = last.parent / "damaged"
        number = sum(path.name.startswith(last.name) for path in aside.iterdir()) if aside.exists() else 0

        def recovered() -> bool:
            right = went_on_from(before, ledger, since)
            if right is False:
                self.recoveries.blame(f"{name}: {what}, and the run did not go on from step {step_of(before)}")
            kept = aside / (f"{last.name}.{number}" if number else last.name)
            beside = last.with_name(f"{last.name}.damaged")  # if the disk is too full for a folder
            return again() and right is not None and (kept.exists() or beside.exists())

        self.recoveries.expect(name, LEARNER, recovered)
        return True

    def go_back_past_an_engine(self, name: str) -> bool:
        """A damaged checkpoint, and an engine that the new learner does not reach for a while: what is sampled from its
        weights, which have been undone, counts no more."""
        running = [slot for slot in self.system.members("engine") if not self.recoveries.is_broken(("engine", slot))]
        if not running or not self.damage_checkpoint(name):
            return False
        slot = self.random.choice(running)
        self.system.links[slot].disturb("deaf", UNREACHED_S)
        over = time.monotonic() + UNREACHED_S
        served = self.recoveries.serves
        self.recoveries.expect(
            f"{name}: that is served", ("engine", slot), lambda: time.monotonic() > over and served(slot)
        )
        return True

    # ------------------------------------------------------------------ connections of its ranks

    def between_ranks(self) -> list[Line]:
        """The ends at one of the two."""
        ranks = self.system.ranks()
        self.random.shuffle(ranks)
        return between(*ranks)

    def delay_ranks(self, name: str) -> bool:
        lines = self.between_ranks() if self.is_whole() else []
        if not silence(lines):
            return False
        seconds = self.random.uniform(1.0, 4.0)
        self.recoveries.after(seconds, partial(release, lines))
        return self.recoveries.expect_step_after(seconds, name, LEARNER)

    def cut_ranks(self, name: str) -> bool:
        lines = self.between_ranks() if self.is_whole() else []
        return bool(lines) and self.end(lambda: cut(lines), name)

    def forget_ranks(self, name: str) -> bool:
        """Nothing arrives for a while, then the connections are closed, as by a firewall that has forgotten them."""
        lines = self.between_ranks() if self.is_whole() else []
        if not silence(lines):
            return False
        self.recoveries.after(self.random.uniform(4.0, 12.0), lambda: (release(lines), cut(lines)))
        return self.end(lambda: None, name)

    def start_another(self, name: str) -> bool:
        """A second learner with the same recipe must say in one line that the run folder is taken, and end; the first
        trains on."""
        if not self.is_whole():
            return False
        ranks, began = self.system.ranks(), time.monotonic()
        said = self.system.folder / "second_learner.log"
        with said.open("wb") as file:
            command = [sys.executable, "launch/learner.py", *self.system.arguments]
            second = subprocess.Popen(command, stdout=file, stderr=file)
        trained = self.recoveries.a_step_after(lambda: second.poll() is not None)
        judged: list[str] = []

        def recovered() -> bool:
            if second.poll() is None and time.monotonic() - began > SECOND_ENDS_S:
                second.kill()
                second.wait()
            if second.poll() is not None and not judged:
                judged.append(wrong_with(second.returncode, said, self.system.run))
                if judged[0] and self.system.ranks() == ranks:  # else there was a moment without a learner
                    self.recoveries.blame(f"{name}: {judged[0]}")
            return trained()

        self.recoveries.expect(name, LEARNER, recovered)
        return True


def wrong_with(code: int, said: Path, run: Path) -> str:
    """What a second learner on a run's folder did wrong; empty if it refused in one line."""
    lines = said.read_text(errors="replace").splitlines()
    if code <= 0:
        return f"it ended with {code}"
    if len(lines) != 1 or f"the run folder {run} is in use" not in lines[0]:
        return f"it said {lines[-3:]}"
    return ""


def wait_until_gone(pids: list[int]) -> None:
    """Of processes that were killed; RuntimeError if one is still there after a while."""
    deadline = time.monotonic() + GONE_S
    while any(is_there(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} were killed and do not end")
        time.sleep(0.05)
