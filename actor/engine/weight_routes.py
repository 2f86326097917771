"""The embedded engine's routes for weights: groups, updates, and what the model holds.

An update is received beside generation, into memory of its own; `end_weight_update` installs all of it between two
steps. So no token is ever computed by a mixture, and an update that is discarded leaves no trace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from torch import Tensor

from actor.engine.http import Handler, HttpError
from actor.engine.scheduler import Scheduler
from actor.engine.weight_loader import Entry, WeightLoader, broadcast, join_group, parse_entries, raw_bytes
from shared.engine_messages import checksums

log = logging.getLogger("engine")


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

    async def init_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name, backend = body.get("group_name", "weight_update_group"), body.get("backend", "nccl")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend is {backend!r}: use gloo or nccl")
        if name in self._groups:
            raise ValueError(f"the group {name!r} exists: destroy it first")
        missing = [key for key in ("master_address", "master_port", "rank_offset", "world_size") if key not in body]
        if missing:
            raise ValueError(f"the request lacks {', '.join(missing)}")
        rank, size = int(body["rank_offset"]), int(body["world_size"])
        try:
            self._groups[name] = await asyncio.to_thread(
                join_group,
                address=body["master_address"],
                port=int(body["master_port"]),
                rank=rank,
                world_size=size,
                name=name,
                backend=backend,
                timeout_s=self._timeout_s,
            )
        except RuntimeError as error:
            raise HttpError(400, f"cannot join the group {name!r}: {' '.join(str(error).split())}") from error
        log.info("joined %s as rank %d of %d over %s", name, rank, size, backend)
        return {"success": True, "message": f"joined {name}"}

    async def destroy_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.get("group_name", "weight_update_group")
        if self._groups.pop(name, None) is None:
            raise ValueError(f"there is no group {name!r}")
        return {"success": True, "message": f"left {name}"}

    async def begin(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._received is not None:
            raise ValueError("an update is open already: end it first")
        self._received, self._broken, self._flush, self._version = [], False, False, None
        return {"success": True, "message": "ready for weights"}

    async def update(self, body: dict[str, Any]) -> dict[str, Any]:
        received = self._received
        if received is None:
            raise ValueError("weights must come between begin_weight_update and end_weight_update")
        self._broken = True  # until this bucket is there
        if body.get("load_format") != "flattened_bucket":
            raise ValueError(f"load_format is {body.get('load_format')!r}: use flattened_bucket")
        group = self._groups.get(body.get("group_name", "weight_update_group"))
        if group is None:
            raise ValueError(f"there is no group {body.get('group_name')!r}: call init_weights_update_group first")
        entries = parse_entries(body.get("names", []), body.get("dtypes", []), body.get("shapes", []))
        self.loader.check(entries)
        size = sum(entry.nbytes for entry in entries)
        flat = torch.empty(size, dtype=torch.uint8, device=self.loader.device)
        try:
            await asyncio.to_thread(broadcast, group, flat, self._timeout_s)
        except RuntimeError as error:
            raise HttpError(400, f"the broadcast failed: {' '.join(str(error).split())}") from error
        received.append((flat, entries))
        self._broken = False
        self._flush |= bool(body.get("flush_cache", True))
        self._version = body.get("weight_version", self._version)
        return {"success": True, "message": f"{len(entries)} parameters"}

    async def end(self, body: dict[str, Any]) -> dict[str, Any]:
        """Installs what was received; an update that failed, or is ended with `discard`, changes nothing."""
        received, self._received = self._received, None
        if received is None:
            raise ValueError("no update is open: call begin_weight_update first")
        if body.get("discard"):
            return {"success": True, "message": f"discarded; the weights are {self._scheduler.weight_version}"}
        if self._broken:
            raise ValueError(f"the update failed and is discarded; the weights are {self._scheduler.weight_version}")
        version = body.get("weight_version", self._version)

        def install() -> None:
            for flat, entries in received:
                self.loader.load(flat, entries)
            self._scheduler.weights_changed(None if version is None else str(version), self._flush)

        await self._on_model(install)
        return {"success": True, "message": f"weights {self._scheduler.weight_version}"}

    async def get(self, body: dict[str, Any]) -> list[Any]:
        limit = int(body.get("truncate_size", 100))
        return await self._on_model(lambda: self.loader.get(str(body.get("name")), limit))

    async def check(self, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang's checksums: of every parameter whose name holds no fragment in `skip_tensor_list`."""
        action, skip = body.get("action", "checksum"), body.get("skip_tensor_list") or []
        if action != "checksum":
            raise ValueError(f"action is {action!r}: use checksum")
        taken = await self._on_model(lambda: self.loader.snapshot([str(part) for part in skip]))
        found = await asyncio.to_thread(checksums, ((name, raw_bytes(values)) for name, values in taken))
        return {"success": True, "message": "Success.", "ranks": [{"checksums": found}]}
