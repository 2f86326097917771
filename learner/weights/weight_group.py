"""The process group over which weights are sent: rank 0 of the learner and every rank of the engines."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from shared.engine.engine_api import EngineClient, EngineError, each, reasons
from shared.engine.engine_messages import ServerInfo
from shared.engine.weight_group_names import DEVICES, FIRST_BYTES, watchdog_s, without_watchdog
from shared.log import get_logger
from shared.spans import span
from shared.util.threads import in_thread

# Time for the remaining answers after one participant has failed.
LAST_WORD_S = 2.0
# Time limit for breaking a group up, which may itself wait for the network.
ABORT_S = 10.0
LEAVE_S = 5.0
Members = Mapping[EngineClient, ServerInfo]


class EnginesFailed(Exception):
    """Engines that are at fault: `reasons` is URL -> reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{url}: {reason}" for url, reason in reasons.items()))
        self.reasons = reasons


class WeightGroup:
    """The learner's end (rank 0) of a process group beside the default one; the engines are the other ranks. Its
    methods block.

    The store has the same keys as in torch's own group constructor, so the engines may build their end with that.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        backend: str,
        timeout_s: float,
        device: int = 0,
    ) -> None:
        """Open the store; `connect` waits for the engines. `device`: index of this rank's GPU, if the backend needs
        one."""
        self.name = name
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self.device = torch.device("cpu") if DEVICES[backend] == "cpu" else torch.device(DEVICES[backend], device)
        timeout = timedelta(seconds=timeout_s)
        tcp = dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        self.port = tcp.port
        self._tcp: Any = tcp
        self._group: Any = None

    def connect(self) -> None:
        """Wait until all engines have joined. Raise RuntimeError after the time limit."""
        timeout = timedelta(seconds=self.timeout_s)
        inner = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._tcp))
        store = dist.PrefixStore(f"{self.device.type}/", inner)
        store.set_timeout(timeout)
        try:
            if self.backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, 0, self.world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=watchdog_s(self.timeout_s))
                with without_watchdog():
                    self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, options)
        finally:
            del store, inner  # a traceback must not keep the store open: engines wait on it
        if self.backend == "nccl":
            self.broadcast(torch.zeros(FIRST_BYTES, dtype=torch.uint8))

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor, on any device, to all engines. Raise RuntimeError after the time limit, or if an engine is
        gone."""
        tensor = tensor.to(self.device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._group.broadcast([tensor], options)
        try:
            if not work.wait(timedelta(seconds=self.timeout_s)):
                raise RuntimeError(f"the broadcast took longer than {self.timeout_s:g} s")
        finally:
            del work  # a traceback must not keep the connections open: engines wait on them
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    async def abort(self) -> None:
        """Break the connections and the store within `ABORT_S`, so that nobody goes on waiting for a failed group."""
        group, self._tcp, self._group = self._group, None, None
        if group is not None:
            abort = asyncio.create_task(in_thread(group.abort))
            await asyncio.wait([abort], timeout=ABORT_S)
            if abort.done() and abort.exception():  # no thread could be started
                group.abort()


class WeightGroupManager:
    """Holds the group of rank 0 and the engines; builds a new one if the engines change or anything in the group
    fails."""

    def __init__(self, backend: str, timeout_s: float, device: int = 0) -> None:
        self.backend = backend
        self.timeout_s = timeout_s
        self._device = device
        self._log = get_logger("publisher")
        self._members: tuple[EngineClient, ...] = ()
        self._group: WeightGroup | None = None
        self._generation = 0
        self._nonce = os.urandom(4).hex()  # an engine may still hold the groups of a learner that was killed
        self._leaving = set[asyncio.Task[None]]()

    @property
    def call_timeout_s(self) -> float:
        """Time limit of an engine's part in a joint action: longer than rank 0's own, so that rank 0 gives up first."""
        return self.timeout_s + 2 * LAST_WORD_S

    async def group_of(self, members: Members) -> WeightGroup:
        """Return the group with exactly these engines. Raise EnginesFailed with those that did not join.

        Neither gloo nor NCCL can add or remove a member, so any change needs a new group. This does not wait until all
        engines have left the old one.
        """
        if self._group is not None and self._members == tuple(members):
            return self._group
        await self._give_up()
        self._generation += 1
        size = 1 + sum(info.num_ranks for info in members.values())
        name = f"pronk_weights_{self._nonce}_{self._generation}"
        group = WeightGroup(name, size, self.backend, self.timeout_s, self._device)
        self._members, self._group = tuple(members), group
        calls, rank = {}, 1
        for engine, info in members.items():
            calls[engine] = self._join(engine, rank)
            rank += info.num_ranks
        await self._together("join the group", calls, group.connect)
        return group

    async def send(self, tensor: Tensor, contents: Mapping[EngineClient, bytes]) -> float:
        """Broadcast a flat bucket to all engines of the group; return the seconds that rank 0's own part took.

        `contents`: the description of the bucket for each engine. Raise EnginesFailed as `group_of` does.
        """
        group, seconds, started = self._group, 0.0, time.monotonic()
        assert group is not None

        def broadcast() -> None:
            nonlocal seconds
            with span("broadcast", track="broadcast"):
                group.broadcast(tensor)
            seconds = time.monotonic() - started

        calls = {engine: engine.receive(content, self.call_timeout_s) for engine, content in contents.items()}
        await self._together("send weights", calls, broadcast)
        return seconds

    async def _join(self, engine: EngineClient, rank: int) -> None:
        assert self._group is not None
        body = {
            "master_address": await own_address(engine.url),
            "master_port": self._group.port,
            "world_size": self._group.world_size,
            "group_name": self._group.name,
            "backend": self.backend,
        }
        await engine.join_group(body, rank, self.call_timeout_s)

    async def shutdown(self) -> None:
        """Wait until each engine has left the group or has failed to answer."""
        await self._give_up()
        await asyncio.gather(*self._leaving)

    async def _give_up(self) -> None:
        group, members = self._group, self._members
        self._group, self._members = None, ()
        if group is not None:
            await group.abort()
            task = asyncio.create_task(self._leave(group.name, members))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, name: str, members: Collection[EngineClient]) -> None:
        left = await each(members, lambda engine: engine.leave_group(name, LEAVE_S))
        self._log.debug("engines that did not leave the group: %s", reasons(left))

    async def _together(
        self, action: str, calls: Mapping[EngineClient, Coroutine[Any, Any, None]], rank_0_part: Callable[[], None]
    ) -> None:
        """Run each engine's call and rank 0's own part concurrently; if any fails, raise EnginesFailed with the engines
        at fault.

        After a failure the group is broken up, so that engines that waited for another one answer. At fault are, in
        this order: engines whose connection broke or that do not answer /health now; if rank 0's own part failed, those
        that are still silent; those that refused before the group was broken up.
        """
        tasks = {engine: asyncio.create_task(call) for engine, call in calls.items()}
        rank_0 = asyncio.create_task(in_thread(rank_0_part))
        everything = {*tasks.values(), rank_0}
        await asyncio.wait(everything, timeout=self.timeout_s + 1.0, return_when=asyncio.FIRST_EXCEPTION)
        if rank_0.done() and rank_0.exception():  # the engine that caused it may still give its reason
            await asyncio.wait(tasks.values(), timeout=LAST_WORD_S, return_when=asyncio.FIRST_EXCEPTION)
        refused = reasons(_errors(tasks))  # before the group is broken up
        rank_0_failed = isinstance(rank_0.exception(), RuntimeError) if rank_0.done() else not refused
        if rank_0.done() and not rank_0_failed:
            rank_0.result()
            if all(task.done() for task in tasks.values()) and not refused:
                return
        assert self._group is not None
        await self._group.abort()
        await asyncio.wait(tasks.values(), timeout=LAST_WORD_S)
        errors = _errors(tasks)
        silent = {engine.url: "gave no answer in time" for engine, task in tasks.items() if not task.done()}
        for task in everything:
            task.cancel()
        health = await each(tasks.keys() - errors.keys(), lambda engine: engine.health(LAST_WORD_S))
        gone = reasons(health) | reasons({engine: error for engine, error in errors.items() if error.status == 0})
        at_fault = gone or (silent if rank_0_failed else refused) or refused or silent
        at_fault = at_fault or {engine.url: f"failed to {action}" for engine in calls}
        self._log.warning("could not %s: %s", action, ", ".join(at_fault))
        await self._give_up()
        raise EnginesFailed(at_fault)


def _errors(tasks: Mapping[EngineClient, asyncio.Task[None]]) -> dict[EngineClient, EngineError]:
    """Return the errors of the calls that have failed by now. Raise any error that is not an EngineError."""
    errors = {engine: task.exception() for engine, task in tasks.items() if task.done()}
    for error in errors.values():
        if error is not None and not isinstance(error, EngineError):
            raise error
    return {engine: error for engine, error in errors.items() if isinstance(error, EngineError)}


async def own_address(url: str) -> str:
    """Return the address of this machine that the engine at `url` can reach. Raise EngineError if its host has no
    address."""

    def ask() -> str:
        host = urlsplit(url).hostname or ""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
            probe.connect((socket.gethostbyname(host), 9))
            return str(probe.getsockname()[0])

    try:
        return await in_thread(ask)
    except (OSError, UnicodeError) as error:
        raise EngineError(url, f"its host has no address: {error}", sent=False) from None
