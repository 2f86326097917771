"""The embedded engine's routes for weights: groups, updates, and what the model holds.

An update is received beside generation, into memory of its own; `end_weight_update` installs all of it between two
steps. So no token is ever computed by a mixture, and an update that is discarded leaves no trace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from actor.engine.http import AnyObject, Handler
from actor.engine.scheduler import Scheduler
from actor.engine.weight_loader import Entry, WeightLoader, broadcast, join_group, parse_entries, raw_bytes
from shared.engine_messages import checksums

log = logging.getLogger("engine")


class GroupBody(Struct, frozen=True, kw_only=True):
    group_name: str = "weight_update_group"


class InitGroupBody(GroupBody, frozen=True, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"] = "nccl"


class BucketBody(GroupBody, frozen=True, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    load_format: Literal["flattened_bucket"]
    flush_cache: bool = True
    weight_version: str | None = None


class EndBody(Struct, frozen=True):
    """`weight_version` None: as the buckets say. What is received can be thrown away instead: `discard`."""

    weight_version: str | None = None
    discard: bool = False


class NameBody(Struct, frozen=True):
    name: str
    truncate_size: int = 100


class CheckBody(Struct, frozen=True):
    action: Literal["checksum"] = "checksum"
    skip_tensor_list: list[str] | None = None


class WeightUpdates:
    """`on_model` runs a function on the thread that owns the model, between two steps."""

    def __init__(
        self, model: Any, scheduler: Scheduler, on_model: Callable[[Any], Awaitable[Any]], *, timeout_s: float
    ) -> None:
        self.loader = WeightLoader(model)
        self._scheduler, self._on_model, self._timeout_s = scheduler, on_model, timeout_s
        self._groups: dict[str, Any] = {}
        self._received: list[tuple[Tensor, list[Entry]]] | None = None  # of the open update
        self._broken = False
        self._flush = False
        self._version: str | None = None

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
        try:
            self._groups[name] = await asyncio.to_thread(
                join_group,
                address=body.master_address,
                port=body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=name,
                backend=body.backend,
                timeout_s=self._timeout_s,
            )
        except RuntimeError as error:
            raise ValueError(f"cannot join the group {name!r}: {' '.join(str(error).split())}") from error
        log.info("joined %s as rank %d of %d over %s", name, body.rank_offset, body.world_size, body.backend)
        return {"success": True, "message": f"joined {name}"}

    async def destroy_group(self, body: GroupBody) -> dict[str, Any]:
        if self._groups.pop(body.group_name, None) is None:
            raise ValueError(f"there is no group {body.group_name!r}")
        return {"success": True, "message": f"left {body.group_name}"}

    async def begin(self, _: AnyObject) -> dict[str, Any]:
        if self._received is not None:
            raise ValueError("an update is open already: end it first")
        self._received, self._broken, self._flush, self._version = [], False, False, None
        return {"success": True, "message": "ready for weights"}

    async def update(self, raw: msgspec.Raw) -> dict[str, Any]:
        received = self._received
        if received is None:
            raise ValueError("weights must come between begin_weight_update and end_weight_update")
        self._broken = True  # until this bucket is there; also if its body cannot be read
        body = msgspec.json.decode(raw, type=BucketBody)
        group = self._groups.get(body.group_name)
        if group is None:
            raise ValueError(f"there is no group {body.group_name!r}: call init_weights_update_group first")
        entries = parse_entries(body.names, body.dtypes, body.shapes)
        self.loader.check(entries)
        size = sum(entry.nbytes for entry in entries)
        flat = torch.empty(size, dtype=torch.uint8, device=self.loader.device)
        try:
            await asyncio.to_thread(broadcast, group, flat, self._timeout_s)
        except RuntimeError as error:
            raise ValueError(f"the broadcast failed: {' '.join(str(error).split())}") from error
        received.append((flat, entries))
        self._broken = False
        self._flush |= body.flush_cache
        self._version = body.weight_version or self._version
        return {"success": True, "message": f"{len(entries)} parameters"}

    async def end(self, body: EndBody) -> dict[str, Any]:
        """Installs what was received; an update that failed, or is ended with `discard`, changes nothing."""
        received, self._received = self._received, None
        if received is None:
            raise ValueError("no update is open: call begin_weight_update first")
        if body.discard:
            return {"success": True, "message": f"discarded; the weights are {self._scheduler.weight_version}"}
        if self._broken:
            raise ValueError(f"the update failed and is discarded; the weights are {self._scheduler.weight_version}")
        version = body.weight_version or self._version

        def install() -> None:
            for flat, entries in received:
                self.loader.load(flat, entries)
            self._scheduler.weights_changed(version, self._flush)

        await self._on_model(install)
        return {"success": True, "message": f"weights {self._scheduler.weight_version}"}

    async def get(self, body: NameBody) -> list[Any]:
        return await self._on_model(lambda: self.loader.get(body.name, body.truncate_size))

    async def check(self, body: CheckBody) -> dict[str, Any]:
        """SGLang's checksums: of every parameter whose name holds no fragment in `skip_tensor_list`."""
        taken = await self._on_model(lambda: self.loader.snapshot(body.skip_tensor_list or ()))
        found = await asyncio.to_thread(checksums, ((name, raw_bytes(values)) for name, values in taken))
        return {"success": True, "message": "Success.", "ranks": [{"checksums": found}]}
