"""The embedded engine's routes for weights: groups, updates, and what the model holds.

One learner publishes to an engine, over one group at a time: it gives its group up before it builds another, and never
uses it again. So whoever joins leaves all earlier groups, also those of a learner that was killed and has not left.

An update is received beside generation, into memory of its own; `end_weight_update` installs all of it between two
steps. So no token is ever computed by a mixture, and an update that is discarded leaves no trace, such as one with
weights that are not finite. An update holds weights, or an adapter alone, which is merged then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from actor.engine.adapters import AdapterLoader
from actor.engine.http import Handler
from actor.engine.scheduler import Scheduler
from actor.engine.weight_loader import (
    Entry,
    WeightLoader,
    broadcast,
    check_finite,
    join_group,
    parse_entries,
    raw_bytes,
)
from shared.engine_messages import NO_WEIGHTS
from shared.guards.threads import in_thread
from shared.weights.adapters import is_of_adapter
from shared.weights.checksums import checksums
from shared.weights.group import DEVICES

log = logging.getLogger("engine")
LEAVE_S = 10.0  # for breaking earlier groups up, which may itself wait for the network


class GroupBody(Struct, frozen=True, kw_only=True):
    group_name: str = "weight_update_group"


class InitGroupBody(GroupBody, frozen=True, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"] = "nccl"


class BeginBody(Struct, frozen=True):
    """An update with a name takes the place of one that is open; all that belongs to it must name it."""

    update: str = ""


class BucketBody(GroupBody, frozen=True, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    load_format: Literal["flattened_bucket"]
    flush_cache: bool = True
    weight_version: str | None = None
    update: str = ""


class EndBody(Struct, frozen=True):
    """`weight_version` None: as the buckets say. What is received can be thrown away instead: `discard`."""

    weight_version: str | None = None
    discard: bool = False
    update: str = ""


class NameBody(Struct, frozen=True):
    name: str
    truncate_size: int = 100


class CheckBody(Struct, frozen=True):
    action: Literal["checksum"] = "checksum"
    skip_tensor_list: list[str] | None = None


@dataclass(slots=True)
class OpenUpdate:
    """What has come of an update."""

    name: str
    received: list[tuple[Tensor, list[Entry]]] = field(default_factory=list)
    broken: bool = False
    flush: bool = False
    version: str | None = None

    def check(self, name: str) -> None:
        """ValueError for what belongs to another update."""
        if self.name and name != self.name:
            raise ValueError(f"the update under way is {self.name[:100]!r}, not {name[:100]!r}")


class WeightUpdates:
    """`on_model` runs a function on the thread that owns the model, between two steps."""

    def __init__(
        self, model: Any, scheduler: Scheduler, on_model: Callable[[Any], Awaitable[Any]], *, timeout_s: float
    ) -> None:
        self.loader = WeightLoader(model)
        self.adapters = AdapterLoader(self.loader)
        self._scheduler, self._on_model, self._timeout_s = scheduler, on_model, timeout_s
        self._groups: dict[str, Any] = {}
        self._open: OpenUpdate | None = None

    def routes(self) -> dict[str, Handler]:
        return {
            "POST /init_weights_update_group": self.init_group,
            "POST /destroy_weights_update_group": self.destroy_group,
            "POST /begin_weight_update": self.begin,
            "POST /update_weights_from_distributed": self.update,
            "POST /end_weight_update": self.end,
            "POST /get_weights_by_name": self.get,
            "POST /weights_checker": self.check,
        }

    def close(self) -> None:
        self._groups.clear()

    async def init_group(self, body: InitGroupBody) -> dict[str, Any]:
        name = body.group_name
        if name in self._groups:
            raise ValueError(f"the group {name!r} exists: destroy it first")
        earlier = tuple(self._groups)  # not what joins meanwhile: it is newer
        try:
            self._groups[name] = await in_thread(
                lambda: join_group(
                    address=body.master_address,
                    port=body.master_port,
                    rank=body.rank_offset,
                    world_size=body.world_size,
                    name=name,
                    backend=body.backend,
                    timeout_s=self._timeout_s,
                )
            )
        except RuntimeError as error:
            raise ValueError(f"cannot join the group {name!r}: {' '.join(str(error).split())}") from error
        log.info("joined %s as rank %d of %d over %s", name, body.rank_offset, body.world_size, body.backend)
        await self._leave(earlier)
        return {"success": True, "message": f"joined {name}"}

    async def _leave(self, names: Iterable[str]) -> None:
        """Breaks them up on another thread: that may wait for the network, and so would freeing them."""
        groups = [group for name in names if (group := self._groups.pop(name, None)) is not None]
        if groups:
            breaking = asyncio.create_task(in_thread(lambda: [group.abort() for group in groups]))
            done, _ = await asyncio.wait([breaking], timeout=LEAVE_S)
            if not done or breaking.exception() is not None:
                log.warning("earlier groups of weights are not broken up: %s", breaking.exception() if done else "late")

    async def destroy_group(self, body: GroupBody) -> dict[str, Any]:
        if self._groups.pop(body.group_name, None) is None:
            raise ValueError(f"there is no group {body.group_name!r}")
        return {"success": True, "message": f"left {body.group_name}"}

    async def begin(self, body: BeginBody) -> dict[str, Any]:
        if self._open is not None and not body.update:
            raise ValueError("an update is open already: end it first")
        self._open = OpenUpdate(body.update)
        return {"success": True, "message": "ready for weights"}

    async def update(self, raw: msgspec.Raw) -> dict[str, Any]:
        update = self._open
        if update is None:
            raise ValueError("weights must come between begin_weight_update and end_weight_update")
        update.check(msgspec.json.decode(raw, type=BeginBody).update)
        update.broken = True  # until this bucket is there; also if its body cannot be read
        body = msgspec.json.decode(raw, type=BucketBody)
        group = self._groups.get(body.group_name)
        if group is None:
            raise ValueError(f"there is no group {body.group_name!r}: call init_weights_update_group first")
        entries = parse_entries(body.names, body.dtypes, body.shapes)
        (self.adapters if is_of_adapter(entries[0].name) else self.loader).check(entries)
        size = sum(entry.nbytes for entry in entries)
        flat = torch.empty(size, dtype=torch.uint8, device=self._place(group))

        def receive() -> None:
            broadcast(group, flat, self._timeout_s)
            check_finite(flat, entries)

        try:
            await in_thread(receive)
        except RuntimeError as error:
            raise ValueError(f"the broadcast failed: {' '.join(str(error).split())}") from error
        update.received.append((flat, entries))
        update.broken = False
        update.flush |= body.flush_cache
        update.version = body.weight_version or update.version
        return {"success": True, "message": f"{len(entries)} parameters"}

    def _place(self, group: Any) -> torch.device:
        """Where this group's buckets arrive: gloo's in the host's memory, also those for a model on a GPU."""
        return torch.device("cpu") if DEVICES[group.name()] == "cpu" else self.loader.device

    async def end(self, body: EndBody) -> dict[str, Any]:
        """Installs what was received; an update that failed, or is ended with `discard`, changes nothing."""
        update = self._open
        if update is None:
            raise ValueError("no update is open: call begin_weight_update first")
        update.check(body.update)
        self._open = None
        if body.discard:
            return {"success": True, "message": f"discarded; the weights are {self._scheduler.weight_version}"}
        if update.broken:
            raise ValueError(f"the update failed and is discarded; the weights are {self._scheduler.weight_version}")
        version = body.weight_version or update.version
        adapter = self.adapters.collected(update.received)

        def install() -> None:
            if adapter:
                self.adapters.keep_base(adapter)
            try:
                if adapter:
                    self.adapters.install(adapter)
                else:
                    for flat, entries in update.received:
                        self.loader.load(flat, entries)
            except BaseException:  # some of the weights are new ones: no version names the mixture
                self._scheduler.weights_changed(NO_WEIGHTS, flush=True)
                raise
            self._scheduler.weights_changed(version, update.flush)

        await self._on_model(install)
        return {"success": True, "message": f"weights {self._scheduler.weight_version}"}

    async def get(self, body: NameBody) -> list[Any]:
        return await self._on_model(lambda: self.loader.get(body.name, body.truncate_size))

    async def check(self, body: CheckBody) -> dict[str, Any]:
        """SGLang's checksums: of every parameter whose name holds no fragment in `skip_tensor_list`."""
        taken = await self._on_model(lambda: self.loader.snapshot(body.skip_tensor_list or ()))
        found = await in_thread(lambda: checksums((name, raw_bytes(values)) for name, values in taken))
        return {"success": True, "message": "Success.", "ranks": [{"checksums": found}]}
