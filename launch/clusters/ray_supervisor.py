"""A run's supervisor inside Ray: reserves nodes for the hosts, starts them, and restarts them when they fail.

Hosts end with the supervisor that started them. If Ray restarts the supervisor on another node, it starts them again,
and the learner continues from its last checkpoint. Like the hosts' classes, this code is pickled by value for Ray's
workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.clusters.ray_hosts import ENDED, LEAVE_S, Host, HostRole, RayPlan

USER_ERROR = 2  # exit code
POLL_S = 0.5
OTHERS_END_S = 60.0  # time for engines and actors to end after the learner
SETTLE_S = 5.0  # wait after one of several hosts has failed, for the exit codes of the others
RAN_WELL_S = 60.0
LONGEST_PAUSE_S = 60.0


def now() -> str:
    """Return the time, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


class Failed(Exception):
    """A part has failed and is not restarted; the text says why."""


class Head:
    """The address of the learner's first host, shared by all parts."""

    address = ""  # "" while the learner does not run


class Life:
    """Runs one part of the run, through all its restarts."""

    def __init__(self, part: HostRole, plan: RayPlan, head: Head) -> None:
        """Prepare to run one part; all parts share `head`."""
        self.part, self.plan, self.head = part, plan, head
        self.starts, self.restarts = 0, 0
        self.say("waits for room")
        self.addresses: list[str] = []
        self.hosts: list[Any] = []
        self.group: Any = None

    def say(self, state: str) -> None:
        self.state, self.since = state, now()

    async def live(self) -> None:
        """Run the part until its commands have ended successfully. Raise Failed if they cannot, or after too many
        restarts. If cancelled, give the commands their time to end."""
        early, leave_s = 0, LEAVE_S
        while True:
            began = time.monotonic()
            try:
                failure = await self.once()
            except RayError as error:
                failure = f"lost its node or its process there ({type(error).__name__})"
            except Failed:
                self.say("has failed")
                raise
            except asyncio.CancelledError:
                leave_s = self.part.leave_s
                self.say("leaves")
                raise
            finally:
                await self.clear(leave_s)
            if failure is None:
                self.say("has ended")
                return
            if failure == "":  # the learner has a new address
                continue
            self.restarts += 1
            if self.restarts > self.plan.restarts:
                self.say("has failed")
                raise Failed(f"{self.part.name} {failure}, after {self.plan.restarts} restarts (cluster.restarts)")
            early = early + 1 if time.monotonic() - began < RAN_WELL_S else 0
            self.say(f"{failure}; starts again")
            await asyncio.sleep(min(LONGEST_PAUSE_S, 2.0 ** (early - 1)) if early else 0.0)

    async def once(self) -> str | None:
        """Run the part once. Return None if all commands succeeded, "" if the learner has a new address, else what
        failed, in words."""
        part = self.part
        await self.take_room()
        head = self.addresses[0]
        if part.is_learner:
            self.head.address = head
        else:
            while not (head := self.head.address):
                await asyncio.sleep(POLL_S)
        logs = Path(self.plan.folder) / "logs"
        starts = []
        for host, number, address in zip(self.hosts, part.numbers, self.addresses, strict=True):
            env = {"PRONK_HEAD": head, "PRONK_HOST": address, "PRONK_NUMBER": str(number)}
            starts.append(host.start.remote(part.command, env, str(logs / f"{part.log(number)}.log")))
        await asyncio.gather(*starts)
        self.starts += 1
        self.say("runs")
        while True:
            codes = await self.poll()
            if any(codes):
                if len(codes) > 1:
                    await asyncio.sleep(SETTLE_S)
                    codes = await self.poll()
                return self.failure(codes)
            if all(code == 0 for code in codes):
                return None
            if self.head.address not in ("", head):
                return ""
            await asyncio.sleep(POLL_S)

    async def take_room(self) -> None:
        """Reserve nodes, and start a `Host` on each."""
        part, bundles = self.part, [self.part.bundle] * len(self.part.numbers)
        self.say("waits for room")
        strategy = "STRICT_SPREAD" if part.is_learner else "SPREAD"
        self.group = placement_group(bundles, strategy=strategy, name=f"{self.plan.job}-{part.name}")
        await self.group.ready()
        self.say("starts")
        self.hosts = [self.host(index) for index in range(len(bundles))]
        answers = await asyncio.gather(*(host.address.remote(self.plan.address) for host in self.hosts))
        wrong = [reason for _, reason in answers if reason]
        if wrong:
            raise Failed(wrong[0])
        self.addresses = [address for address, _ in answers]

    def host(self, index: int) -> Any:
        bundle, place = self.part.bundle, PlacementGroupSchedulingStrategy(self.group, index)
        takes = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "memory": bundle.get("memory")}
        return ray.remote(Host).options(scheduling_strategy=place, **takes).remote()

    async def poll(self) -> list[int | None]:
        return list(await asyncio.gather(*(host.poll.remote() for host in self.hosts)))

    def failure(self, codes: list[int | None]) -> str:
        """Return what failed, in words. Raise Failed for a mistake of the user's, which a restart would not cure."""
        part = self.part
        logs = ", ".join(
            f"logs/{part.log(number)}.log" for number, code in zip(part.numbers, codes, strict=True) if code
        )
        if USER_ERROR in codes and (part.is_learner or self.starts == 1):
            raise Failed(f"{part.name} ended with exit code {USER_ERROR}, a mistake in the recipe: {logs}")
        return f"ended with exit code {next(code for code in codes if code)} ({logs})"

    async def clear(self, leave_s: float) -> None:
        """End the commands and free the nodes; both are done when this returns."""
        if self.part.is_learner:
            self.head.address = ""
        ends = asyncio.gather(*(host.end.remote(leave_s) for host in self.hosts), return_exceptions=True)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ends, leave_s + LEAVE_S)
        finally:
            for host in self.hosts:
                ray.kill(host)
            if self.group is not None:
                remove_placement_group(self.group)
            self.hosts, self.group, self.addresses = [], None, []

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the status table: part, number, address, state, since, restarts."""
        addresses = self.addresses or ["-"] * len(self.part.numbers)
        return [
            (self.part.kind, str(number), address, self.state, self.since, str(self.restarts))
            for number, address in zip(self.part.numbers, addresses, strict=True)
        ]


class Supervisor:
    """The Ray actor that runs all parts. It is named and detached, so that it outlives the command that submits it; Ray
    restarts it if its node is lost."""

    def __init__(self, plan: RayPlan) -> None:
        self.plan, self.stopping = plan, False
        head = Head()
        self.lives = [Life(part, plan, head) for part in plan.parts]
        self.me = ray.get_runtime_context().current_actor
        threading.Thread(target=lambda: asyncio.run(self.supervise()), name="supervisor", daemon=True).start()

    def status(self) -> list[tuple[str, ...]]:
        return [row for life in self.lives for row in life.rows()]

    def stop(self) -> list[tuple[str, ...]]:
        """Request the end of the run; may be called repeatedly. Return the rows of the status table."""
        self.stopping = True
        return self.status()

    async def supervise(self) -> None:
        ended = Path(self.plan.folder) / ENDED
        if not ended.exists():
            try:
                ending = await self.run()
            except Exception as error:  # noqa: BLE001 - after any error the run must not continue unwatched
                ending = f"its supervisor has failed: {type(error).__name__}: {error}"
            ended.write_text(f"{now()} {' '.join(ending.split())}\n", encoding="utf-8")
        ray.kill(self.me, no_restart=True)

    async def run(self) -> str:
        """Run all parts; return how the run has ended."""
        for life in self.lives:  # free nodes reserved by an earlier supervisor on a lost node
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(f"{self.plan.job}-{life.part.name}"))
        learner, *others = [asyncio.create_task(life.live()) for life in self.lives]
        over = ""
        while not over:
            await asyncio.wait([learner], timeout=POLL_S)
            if learner.done():
                over = str(learner.exception() or "the learner has ended: the run is over")
            elif self.stopping:
                over = "stopped"
            else:
                over = self.without(others)
        if learner.done() and not learner.exception():
            await asyncio.wait(others, timeout=OTHERS_END_S)
        for tasks in ([learner], others):  # the learner writes its last checkpoint while engines still serve
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return over

    def without(self, others: list[asyncio.Task[None]]) -> str:
        """Return a message if all hosts of one kind have failed for good; "" while each kind has a host left."""
        of_kind: dict[str, list[asyncio.Task[None]]] = {}
        for life, task in zip(self.lives[1:], others, strict=True):
            of_kind.setdefault(life.part.kind, []).append(task)
        for kind, tasks in of_kind.items():
            lost = [task.exception() for task in tasks if task.done()]
            if all(lost) and len(lost) == len(tasks):
                return f"no {kind} are left: {lost[-1]}"
        return ""
