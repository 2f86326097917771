"""The real system on this machine under random faults: two learner ranks, two engines, two actors, a bad line and disk.

    python -m tests.chaos --minutes 5 --seed 0

A fault comes every few seconds, whether or not what the last one broke is whole again; only what is broken is not
broken again. The time to recover runs from the injection (so it includes how long a process stands still or a line is
cut) to what this fault holds up: an actor's first group after its restart, an engine that serves the run's weights
again, the next trained step, the next checkpoint. It ends with a table of that, and with what the ledger says: no
ticket trained twice, none lost, and a policy that has learned. The last line is one JSON object; exit code 1 if
anything of that fails, a fault is not recovered from, or fewer than 12 a minute were injected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.chaos.books import DISK, LEARNER, TICK_S, Books
from tests.chaos.proxy import FAULTS
from tests.chaos.report import audit, learning, machine, slow, table
from tests.chaos.system import System

FAULTS_A_MINUTE = 12


class Chaos(Books):
    """Breaks the system at random."""

    def __init__(self, system: System, seed: int) -> None:
        super().__init__(system)
        self.random = random.Random(seed)
        self.injected: Counter[str] = Counter()

    def run(self, seconds: float, every_s: float) -> None:
        """Injects faults for so long, on average `every_s` apart, then waits until all is whole."""
        menu, now = self.menu(), time.monotonic()
        end, due = now + seconds, now
        while now < end or self.waiting or self.later:
            if due <= now < end:
                due += every_s * self.random.uniform(0.2, 1.8)
                self.inject(menu)
            self.tick()
            time.sleep(TICK_S)
            now = time.monotonic()

    # ------------------------------------------------------------------ faults: False = not possible now

    def inject(self, menu: dict[str, tuple[int, Callable[[str], bool]]]) -> None:
        while True:
            name = self.random.choices(list(menu), [weight for weight, _ in menu.values()])[0]
            if menu[name][1](name):
                self.injected[name] += 1
                return

    def menu(self) -> dict[str, tuple[int, Callable[[str], bool]]]:
        """Weight and action of each fault."""
        faults: dict[str, tuple[int, Callable[[str], bool]]] = {
            "actor killed": (6, lambda name: self.kill(name, "actor")),
            "actor stopped": (5, lambda name: self.stop(name, "actor", 8.0)),
            "engine killed": (6, lambda name: self.kill(name, "engine")),
            "engine stopped": (5, lambda name: self.stop(name, "engine", 12.0)),
            "learner rank stopped": (4, self.stop_rank),
            "learner rank killed": (2, lambda name: self.end_learner(name, self.kill_rank)),
            "learner killed": (1, lambda name: self.end_learner(name, lambda: self.system.learner.kill())),
            "learner preempted": (1, lambda name: self.end_learner(name, lambda: self.system.learner.terminate())),
            "environment raises": (4, lambda name: self.environment(name, "raise")),
            "environment hangs": (4, lambda name: self.environment(name, "hang")),
        }
        for fault, name in FAULTS.items():
            faults[name] = (4, lambda name, fault=fault: self.disturb(name, fault))  # type: ignore[misc]
        if self.system.disk:
            faults |= {"disk full": (3, self.fill_disk), "disk slow": (3, self.slow_disk)}
        return faults

    def member(self, kind: str) -> tuple[int, int] | None:
        """Slot and pid of one that is whole."""
        members = [(slot, pid) for slot, pid in self.system.members(kind).items() if not self.broken((kind, slot))]
        return self.random.choice(members) if members else None

    def kill(self, name: str, kind: str) -> bool:
        if not (member := self.member(kind)):
            return False
        (slot, pid), now = member, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if kind == "engine":
            self.wait(f"{name}: answers", None, lambda: self.system.weights_of(slot) is not None)
            self.wait(f"{name}: has the run's weights", (kind, slot), lambda: self.serves(slot))
        else:
            peers = self.system.peers_of
            self.wait(f"{name}: connected", None, lambda: any(p.since > now for p in peers(slot)))
            self.wait(f"{name}: delivered a group", (kind, slot), lambda: any(p.delivered > now for p in peers(slot)))
        return True

    def stop(self, name: str, kind: str, longest_s: float) -> bool:
        if not (member := self.member(kind)):
            return False
        slot, pid = member
        seconds = self.random.uniform(1.0, longest_s)
        over = time.monotonic() + seconds
        os.kill(pid, signal.SIGSTOP)
        self.after(seconds, lambda: go_on(pid))
        if kind == "engine":
            self.wait(name, (kind, slot), lambda: time.monotonic() > over and self.serves(slot))
        else:
            self.wait(name, (kind, slot), lambda: any(p.seen > over for p in self.system.peers_of(slot)))
        return True

    def stop_rank(self, name: str) -> bool:
        ranks = list(self.system.members("learner").values())
        if self.broken(LEARNER) or len(ranks) < 2:
            return False
        seconds, pid = self.random.uniform(1.0, 6.0), self.random.choice(ranks)
        over = time.monotonic() + seconds
        os.kill(pid, signal.SIGSTOP)
        self.after(seconds, lambda: go_on(pid))
        self.wait(name, LEARNER, self.a_step_after(lambda: time.monotonic() > over))
        return True

    def kill_rank(self) -> None:
        os.kill(self.random.choice(list(self.system.members("learner").values())), signal.SIGKILL)

    def end_learner(self, name: str, end: Callable[[], None]) -> bool:
        if self.broken(LEARNER) or len(self.system.members("learner")) < 2:
            return False
        self.wait(name, LEARNER, self.a_step_of_new_ranks())
        end()
        return True

    def environment(self, name: str, flag: str) -> bool:
        path = self.system.flags / flag
        if path.exists():
            return False
        path.touch()
        return self.for_a_while(name, None, path.unlink)

    def disturb(self, name: str, fault: str) -> bool:
        seconds = self.random.uniform(2.0, 6.0)
        self.system.proxy.disturb(fault, seconds)
        return self.for_a_while(name, None, lambda: None, seconds)

    def for_a_while(
        self, name: str, of: tuple[str, int] | None, end: Callable[[], object], seconds: float = 0.0
    ) -> bool:
        seconds = seconds or self.random.uniform(2.0, 6.0)
        over = time.monotonic() + seconds
        self.after(seconds, end)
        self.wait(name, of, self.a_step_after(lambda: time.monotonic() > over))
        return True

    def fill_disk(self, name: str) -> bool:
        disk = self.system.disk
        if disk is None or self.broken(DISK):
            return False
        over: list[float] = []

        def free() -> None:
            disk.free()
            over.append(time.time())

        disk.fill()
        seconds = self.random.uniform(2.0, 8.0)
        self.after(seconds, free)
        self.wait(f"{name}: trained a step", None, self.a_step_after(lambda: bool(over)))
        self.wait(f"{name}: wrote a checkpoint", DISK, lambda: bool(over) and self.system.checkpoint_at() > over[0])
        return True

    def slow_disk(self, name: str) -> bool:
        """Whoever writes stands still for most of each second."""
        disk = self.system.disk
        if disk is None or self.broken(DISK):
            return False
        seconds = self.random.randint(3, 8)
        for second in range(seconds):
            self.after(second, disk.freeze)
            self.after(second + 0.8, disk.thaw)
        return self.for_a_while(name, DISK, lambda: None, float(seconds))


def go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was ended while it stood still
        os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=4.0, metavar="SECONDS", help="between faults, on average")
    parser.add_argument("--no-disk", action="store_true", help="no faults of the disk, which need root anyway")
    parser.add_argument("--folder", type=Path, help="of the run; a new one in the temporary folder by default")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what it has started
    system = System(folder, options.seed, disk=not options.no_disk)
    chaos = Chaos(system, options.seed)
    try:
        chaos.start()
        chaos.run(60 * options.minutes, options.every)
    finally:
        system.stop()
    found = {**audit(system.run), **learning(system.rows())}
    print(table(chaos.injected, chaos.recovered, found))
    faults = chaos.injected.total()
    good = not (found["duplicates"] or found["lost"] or found["steps_missing_in_ledger"] or chaos.given_up)
    good &= found["reward_last"] > found["reward_first"] + 0.2 and faults >= FAULTS_A_MINUTE * options.minutes
    result = {"ok": good, "seed": options.seed, "minutes": options.minutes, "faults": faults, "machine": machine()}
    result |= {"not_recovered": chaos.given_up, "beyond_limit": slow(chaos.recovered), "folder": str(folder)}
    result |= {"no_disk": system.no_disk} if system.no_disk else {}
    print(json.dumps({**result, **found, "messages": dict(system.proxy.counts)}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
