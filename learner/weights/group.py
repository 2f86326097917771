"""The process group that weights travel over: rank 0 of the learner, its companions, and every rank of the engines."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from shared.engine_api import EngineClient, EngineError, each, reasons
from shared.engine_messages import EngineTraits
from shared.guards.threads import in_thread
from shared.log import get_logger
from shared.weights.group import DEVICES, watchdog_s

LAST_WORD_S = 2.0  # for the answers of those that waited for another
ABORT_S = 10.0  # for breaking a group up, which may itself wait for the network
LEAVE_S = 5.0
Members = Mapping[EngineClient, EngineTraits]


class EnginesFailed(Exception):
    """Engines at fault, with reasons."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{url}: {reason}" for url, reason in reasons.items()))
        self.reasons = reasons


class WeightGroup:
    """A learner's end of a process group beside the default one: rank 0's, or that of a companion on its host; engines
    are the last ranks. Its methods block.

    The store's keys are those that torch's own group constructor uses, so the other end may be built by that.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        backend: str,
        timeout_s: float,
        device: int = 0,
        *,
        rank: int = 0,
        port: int = 0,
    ) -> None:
        """Only opens the store, or on a companion that at rank 0's `port`; `connect` waits for the others. `device`:
        this rank's GPU, if the backend needs one."""
        self.name, self.world_size, self.backend, self.timeout_s = name, world_size, backend, timeout_s
        self._rank, host = rank, "127.0.0.1" if rank else "0.0.0.0"
        self.device = torch.device("cpu") if DEVICES[backend] == "cpu" else torch.device(DEVICES[backend], device)
        timeout = timedelta(seconds=timeout_s)
        tcp = dist.TCPStore(host, port, world_size, is_master=not rank, timeout=timeout, wait_for_workers=False)
        self.port = tcp.port
        self._tcp: Any = tcp
        self._group: Any = None

    def connect(self) -> None:
        """Returns when all engines have joined. RuntimeError after the time limit."""
        timeout = timedelta(seconds=self.timeout_s)
        inner = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._tcp))
        store = dist.PrefixStore(f"{self.device.type}/", inner)
        store.set_timeout(timeout)
        try:
            if self.backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, self._rank, self.world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=watchdog_s(self.timeout_s))
                self._group = dist.ProcessGroupNCCL(store, self._rank, self.world_size, options)
        finally:
            del store, inner  # a traceback must not keep the store open: engines wait on it

    def broadcast(self, tensor: Tensor) -> None:
        """To all others, from wherever it lies; on a companion into it. RuntimeError after the time limit, or when
        somebody is gone."""
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
        """Breaks the connections and the store, so that nobody waits for what will not come; within `ABORT_S`."""
        group, self._tcp, self._group = self._group, None, None
        if group is not None:
            breaking = asyncio.create_task(in_thread(group.abort))
            await asyncio.wait([breaking], timeout=ABORT_S)
            if breaking.done() and breaking.exception():  # no thread can be begun
                group.abort()


class WeightGroupManager:
    """Keeps the group of rank 0 and the engines; builds it anew whenever they change or anything in it failed."""

    def __init__(
        self, backend: str, timeout_s: float, device: int = 0, companions: Sequence[EngineClient] = ()
    ) -> None:
        """`companions`: other ranks of the learner, which are spoken to as engines are."""
        self.backend, self.timeout_s, self._device = backend, timeout_s, device
        self._companions = tuple(companions)
        self._log = get_logger("publisher")
        self._members: tuple[EngineClient, ...] = ()  # the engines
        self._group: WeightGroup | None = None
        self._generation = 0
        self._nonce = os.urandom(4).hex()  # an engine may still hold the groups of a learner that was killed
        self._leaving = set[asyncio.Task[None]]()

    @property
    def call_timeout_s(self) -> float:
        """Of an engine's part in what all do at once: longer than rank 0's own, so that rank 0 gives up first."""
        return self.timeout_s + 2 * LAST_WORD_S

    async def group_of(self, members: Members) -> WeightGroup:
        """The group with exactly these engines. EnginesFailed names who did not join.

        Neither gloo nor NCCL takes a member into a group, or lets one go: a change costs a new one. Nobody waits until
        all have left the old one."""
        if self._group is not None and self._members == tuple(members):
            return self._group
        await self._give_up()
        self._generation += 1
        size = 1 + len(self._companions) + sum(traits.num_ranks for traits in members.values())
        name = f"pronk_weights_{self._nonce}_{self._generation}"
        group = WeightGroup(name, size, self.backend, self.timeout_s, self._device)
        self._members, self._group = tuple(members), group
        calls, rank = {}, 1
        for engine, num_ranks in [(c, 1) for c in self._companions] + [(e, t.num_ranks) for e, t in members.items()]:
            calls[engine] = self._join(engine, rank)
            rank += num_ranks
        await self._together("join the group", calls, group.connect)
        return group

    async def send(self, tensor: Tensor, told: Mapping[EngineClient, bytes], content: bytes) -> float:
        """Broadcasts a flat bucket to all that are in the group; the seconds of rank 0's own part. `told`: what each
        engine is told of it; `content`: what companions are. EnginesFailed as `group_of`."""
        group, seconds, started = self._group, 0.0, time.monotonic()
        assert group is not None

        def broadcast() -> None:
            nonlocal seconds
            group.broadcast(tensor)
            seconds = time.monotonic() - started

        contents = dict.fromkeys(self._companions, content) | dict(told)
        calls = {engine: engine.receive(said, self.call_timeout_s) for engine, said in contents.items()}
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
        """All engines have left, or do not answer."""
        await self._give_up()
        await asyncio.gather(*self._leaving)

    async def _give_up(self) -> None:
        group, members = self._group, (*self._companions, *self._members)
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
        self, what: str, calls: Mapping[EngineClient, Coroutine[Any, Any, None]], own: Callable[[], None]
    ) -> None:
        """Runs each engine's call and rank 0's own part at once; EnginesFailed, naming who is at fault, if any fails.

        After a failure the group is broken up, which makes those answer who waited for another. At fault are, in this
        order: engines whose connection broke or that do not answer /health now; where rank 0's own part failed, those
        that stay silent all the same; those that refused while the group was whole.
        """
        tasks = {engine: asyncio.create_task(call) for engine, call in calls.items()}
        mine = asyncio.create_task(in_thread(own))
        everything = {*tasks.values(), mine}
        await asyncio.wait(everything, timeout=self.timeout_s + 1.0, return_when=asyncio.FIRST_EXCEPTION)
        if mine.done() and mine.exception():  # whoever caused that may say why
            await asyncio.wait(tasks.values(), timeout=LAST_WORD_S, return_when=asyncio.FIRST_EXCEPTION)
        refused = reasons(_errors(tasks))  # while the group was whole
        own_failed = isinstance(mine.exception(), RuntimeError) if mine.done() else not refused
        if mine.done() and not own_failed:
            mine.result()
            if all(task.done() for task in tasks.values()) and not refused:
                return
        assert self._group is not None
        await self._group.abort()
        await asyncio.wait(tasks.values(), timeout=LAST_WORD_S)
        errors = _errors(tasks)
        silent = {engine.url: "gave no answer in time" for engine, task in tasks.items() if not task.done()}
        for task in everything:
            task.cancel()
        well = await each(tasks.keys() - errors.keys(), lambda engine: engine.health(LAST_WORD_S))
        gone = reasons(well) | reasons({engine: error for engine, error in errors.items() if error.status == 0})
        at_fault = gone or (silent if own_failed else refused) or refused or silent
        at_fault = at_fault or {engine.url: f"failed to {what}" for engine in calls}
        self._log.warning("could not %s: %s", what, ", ".join(at_fault))
        await self._give_up()
        ours = {companion.url for companion in self._companions}
        self._companions = tuple(companion for companion in self._companions if companion.url not in at_fault)
        raise EnginesFailed({url: reason for url, reason in at_fault.items() if url not in ours})


def _errors(tasks: Mapping[EngineClient, asyncio.Task[None]]) -> dict[EngineClient, EngineError]:
    """Of the calls that have failed by now."""
    errors = {engine: task.exception() for engine, task in tasks.items() if task.done()}
    for error in errors.values():
        if error is not None and not isinstance(error, EngineError):
            raise error
    return {engine: error for engine, error in errors.items() if isinstance(error, EngineError)}


async def own_address(url: str) -> str:
    """The address of this machine that the engine at `url` can reach. EngineError for a host that has none."""

    def ask() -> str:
        host = urlsplit(url).hostname or ""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
            probe.connect((socket.gethostbyname(host), 9))
            return str(probe.getsockname()[0])

    try:
        return await in_thread(ask)
    except (OSError, UnicodeError) as error:
        raise EngineError(url, f"its host has no address: {error}", sent=False) from None
