"""The faults: each is injected into a random part of the running system that is not broken already."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path

from tests.chaos import links
from tests.chaos.engine_faults import EngineFaults
from tests.chaos.learner_faults import Inject, LearnerFaults
from tests.chaos.member_faults import MemberFaults
from tests.chaos.proxy import FAULTS
from tests.chaos.recovery import DISK, LEARNER, Condition, Recoveries
from tests.chaos.system import AGENTS_ACTOR, System
from tests.support.machine import children_of

TICK_S = 0.1
MAY_END_S = 60.0  # after a time without memory; a learner whose thread for engines stands still notices by then


class Faults:
    def __init__(self, system: System, seed: int, only: Collection[str] = ()) -> None:
        """`only`: names of the faults to inject; all by default. ValueError for one that there is not."""
        self.system = system
        self.recoveries = Recoveries(system)
        self.random = random.Random(seed)
        self.injected: Counter[str] = Counter()
        self.faults: dict[str, tuple[int, Inject]] = {  # weight and action
            "actor killed": (6, partial(self.kill, "actor")),
            "actor stopped": (5, partial(self.stop, "actor", 13.0)),
            "engine killed": (6, partial(self.kill, "engine")),
            "engine stopped": (5, partial(self.stop, "engine", 12.0)),
            "learner rank stopped": (4, self.stop_rank),
            "agent killed": (6, self.kill_agent),
            "agents' actor killed": (4, self.kill_agents_actor),
            **LearnerFaults(system, self.recoveries, self.random).all,
            **EngineFaults(system, self.recoveries, self.random).all,
            **MemberFaults(system, self.recoveries, self.random).all,
            "environment raises": (4, partial(self.disturb_environment, "raise")),
            "environment hangs": (4, partial(self.disturb_environment, "hang")),
        }
        self.faults |= {name: (4, partial(self.disturb_messages, fault)) for fault, name in FAULTS.items()}
        self.faults |= {name: (3, partial(self.disturb_link, fault)) for fault, name in links.FAULTS.items()}
        for kind in ("actor", "engine", "learner"):
            self.faults[f"{kind} out of descriptors"] = (2, partial(self.starve, kind, resource.RLIMIT_NOFILE))
            self.faults[f"{kind} out of memory"] = (2, partial(self.starve, kind, resource.RLIMIT_AS))
        if system.disk:
            self.faults |= {"disk full": (3, self.fill_disk), "disk slow": (3, self.slow_disk)}
            self.faults |= {"disk stands still": (2, self.stall_disk)}
        if unknown := set(only) - set(self.faults):
            raise ValueError(f"there is no fault {sorted(unknown)[0]!r}; there are: {', '.join(self.faults)}")
        self.faults = {name: fault for name, fault in self.faults.items() if not only or name in only}

    def run(self, seconds: float, every_s: float) -> None:
        """Injects faults for so long, on average `every_s` apart, then waits until the system has recovered."""
        now = time.monotonic()
        end, due = now + seconds, now
        while now < end or self.recoveries.pending or self.recoveries.scheduled:
            if due <= now < end:
                due += every_s * self.random.uniform(0.2, 1.8)
                self.inject()
            self.recoveries.tick()
            time.sleep(TICK_S)
            now = time.monotonic()

    def inject(self) -> None:
        """One fault that is possible now, if any is."""
        left = dict(self.faults)
        while left:
            name = self.random.choices(list(left), [weight for weight, _ in left.values()])[0]
            if left.pop(name)[1](name):
                self.injected[name] += 1
                return

    def intact(self, kind: str) -> tuple[int, int] | None:
        """Slot and process id of an actor or engine that no fault has broken."""
        running = self.system.members(kind).items()
        intact = [(slot, pid) for slot, pid in running if not self.recoveries.is_broken((kind, slot))]
        return self.random.choice(intact) if intact else None

    # ------------------------------------------------------------------ processes

    def kill(self, kind: str, name: str) -> bool:
        if not (member := self.intact(kind)):
            return False
        (slot, pid), now = member, time.monotonic()
        self.system.deaths.expect([pid])
        os.kill(pid, signal.SIGKILL)
        expect, peers = self.recoveries.expect, self.system.peers_of
        if kind == "engine":
            expect(f"{name}: answers", None, lambda: self.system.weights_of(slot) is not None)
            expect(f"{name}: has the run's weights", (kind, slot), lambda: self.recoveries.serves(slot))
        else:
            expect(f"{name}: connected", None, lambda: any(p.since > now for p in peers(slot)))
            expect(f"{name}: delivered a group", (kind, slot), lambda: any(p.delivered > now for p in peers(slot)))
        return True

    def kill_agent(self, name: str) -> bool:
        """One of the processes that play what they lease, amid its episodes: these end when their leases run out."""
        agent = self.random.choice(self.system.agents)
        agent.kill()
        self.recoveries.expect(name, None, self.recoveries.a_step_after(lambda: agent not in self.system.agents))
        return True

    def kill_agents_actor(self, name: str) -> bool:
        """The actor whose episodes the agents play: all of their leases end with it."""
        found, part, now = children_of(self.system.agents_host.pid), ("actor", AGENTS_ACTOR), time.monotonic()
        if not found or self.recoveries.is_broken(part):
            return False
        os.kill(found[0], signal.SIGKILL)
        peers = self.system.peers_of
        self.recoveries.expect(f"{name}: connected", None, lambda: any(p.since > now for p in peers(AGENTS_ACTOR)))
        self.recoveries.expect(
            f"{name}: delivered a group", part, lambda: any(p.delivered > now for p in peers(AGENTS_ACTOR))
        )
        return True

    def stop(self, kind: str, longest_s: float, name: str) -> bool:
        if not (member := self.intact(kind)):
            return False
        slot, pid = member
        over = self.pause(pid, self.random.uniform(1.0, longest_s))
        self.recoveries.expect(name, (kind, slot), self.well_after(over, kind, slot))
        return True

    def well_after(self, over: float, kind: str, slot: int) -> Condition:
        """An engine serves, an actor is heard, a step is trained, after the time `over`."""

        def recovered() -> bool:
            if kind == "engine":
                return time.monotonic() > over and self.recoveries.serves(slot)
            return any(peer.seen > over for peer in self.system.peers_of(slot))

        return self.recoveries.a_step_after(lambda: time.monotonic() > over) if kind == "learner" else recovered

    def starve(self, kind: str, limited: int, name: str) -> bool:
        """For a while a process gets no more memory, or no more descriptors. Without memory it may end, and is started
        again; without descriptors it may not."""
        if not (member := self.intact(kind)) or (kind == "learner" and self.recoveries.is_broken(LEARNER)):
            return False
        slot, pid = member
        seconds = self.random.uniform(1.0, 4.0)
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            usual = resource.prlimit(pid, limited)
            most = pages * resource.getpagesize() if limited == resource.RLIMIT_AS else 3
            resource.prlimit(pid, limited, (most, usual[1]))
        except (OSError, ValueError):  # it has just ended
            return False
        if limited == resource.RLIMIT_AS:
            victims = self.system.ranks() if kind == "learner" else [pid]  # torchrun starts all ranks again
            self.system.deaths.expect(victims, seconds + MAY_END_S)

        def give_back() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, limited, usual)

        self.recoveries.after(seconds, give_back)
        part = LEARNER if kind == "learner" else (kind, slot)
        self.recoveries.expect(name, part, self.well_after(time.monotonic() + seconds, kind, slot))
        return True

    def stop_rank(self, name: str) -> bool:
        ranks = self.system.ranks()
        if self.recoveries.is_broken(LEARNER) or len(ranks) < 2:
            return False
        seconds = self.random.uniform(1.0, 6.0)
        self.pause(self.random.choice(ranks), seconds)
        return self.recoveries.expect_step_after(seconds, name, LEARNER)

    def pause(self, pid: int, seconds: float) -> float:
        """Stops a process; returns when it goes on."""

        def resume() -> None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGCONT)

        os.kill(pid, signal.SIGSTOP)
        self.recoveries.after(seconds, resume)
        return time.monotonic() + seconds

    # ------------------------------------------------------------------ environment, messages, disk

    def disturb_environment(self, fault: str, name: str) -> bool:
        flag = self.system.flags / fault
        if flag.exists():
            return False
        flag.touch()
        seconds = self.random.uniform(2.0, 6.0)
        self.recoveries.after(seconds, flag.unlink)
        return self.recoveries.expect_step_after(seconds, name)

    def disturb_messages(self, fault: str, name: str) -> bool:
        seconds = self.random.uniform(2.0, 6.0)
        self.system.proxy.disturb(fault, seconds)
        return self.recoveries.expect_step_after(seconds, name)

    def disturb_link(self, fault: str, name: str) -> bool:
        """All that actors and learner say to one engine over HTTP, and its answers; the weights' broadcast is apart."""
        if not (member := self.intact("engine")):
            return False
        slot, seconds = member[0], self.random.uniform(2.0, 6.0)
        self.system.links[slot].disturb(fault, seconds)
        over = time.monotonic() + seconds
        self.recoveries.expect(name, ("engine", slot), self.well_after(over, "engine", slot))
        return True

    def fill_disk(self, name: str) -> bool:
        disk = self.system.disk
        if disk is None or self.recoveries.is_broken(DISK):
            return False
        disk.fill()
        seconds = self.random.uniform(2.0, 8.0)
        over = time.time() + seconds  # by the clock of the files' times
        self.recoveries.after(seconds, disk.free)
        self.recoveries.expect_step_after(seconds, f"{name}: trained a step")
        self.recoveries.expect(f"{name}: wrote a checkpoint", DISK, lambda: self.system.checkpoint_at() > over)
        return True

    def slow_disk(self, name: str) -> bool:
        """Makes each write wait for most of each second."""
        disk = self.system.disk
        if disk is None or self.recoveries.is_broken(DISK):
            return False
        seconds = self.random.randint(3, 8)
        for second in range(seconds):
            self.recoveries.after(second, disk.freeze)
            self.recoveries.after(second + 0.8, disk.thaw)
        return self.recoveries.expect_step_after(seconds, name, DISK)

    def stall_disk(self, name: str) -> bool:
        """No write returns for a while."""
        disk = self.system.disk
        if disk is None or self.recoveries.is_broken(DISK):
            return False
        seconds = self.random.uniform(3.0, 12.0)
        disk.freeze()
        self.recoveries.after(seconds, disk.thaw)
        return self.recoveries.expect_step_after(seconds, name, DISK)
