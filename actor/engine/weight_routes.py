"""The embedded engine's routes for weights: joining groups, receiving updates, and reading the model's weights.

One learner publishes to an engine, over one group at a time: it gives up its group before it builds another. So the
engine leaves all earlier groups when it joins a new one, including those of a learner that was killed. A learner claims
the engine first, and again every few seconds; while it does, the claim of another run is refused.

An update is received during generation into separate memory; `end_weight_update` installs all of it between two steps.
So no token is ever computed by a mixture of weights, and a discarded update (because of weights that are not finite,
for example) has no effect. An update holds either weights or an adapter, which is then merged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from actor.engine.http import Handler, HttpError
from actor.engine.merged_adapter import AdapterLoader
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
from shared.engine.adapter_names import is_of_adapter
from shared.engine.checksums import checksums
from shared.engine.engine_messages import CLAIM_ROUTE, UNTRAINED
from shared.engine.weight_group_names import DEVICES
from shared.util.threads import in_thread

log = logging.getLogger("engine")
CLAIM_S = 30.0  # a learner that has not been heard of for this long has no claim any more
LEAVE_S = 10.0  # time limit for breaking up earlier groups, which may wait for the network


class GroupBody(Struct, frozen=True, kw_only=True):
    group_name: str = "weight_update_group"


class InitGroupBody(GroupBody, frozen=True, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"] = "nccl"


class ClaimBody(Struct, frozen=True):
    """A learner's claim to an engine: the run's name, and a token that its processes share and no other run has.
    `ends`: the learner is over."""

    run: Annotated[str, Meta(max_length=256)]
    token: Annotated[str, Meta(min_length=1, max_length=64)]
    ends: bool = False


class BeginBody(Struct, frozen=True):
    """The body that opens an update. A named update replaces one that is open; all its buckets and its end must carry
    the name."""

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
    """The body that ends an update. `weight_version` None: the version in the buckets. `discard` drops what was
    received instead of installing it."""

    weight_version: str | None = None
    discard: bool = False
    update: str = ""


class RenameBody(Struct, frozen=True):
    new_version: Annotated[str, Meta(max_length=100)]
    abort_all_requests: Literal[False] = False


class NameBody(Struct, frozen=True):
    name: str
    truncate_size: int = 100


class CheckBody(Struct, frozen=True):
    action: Literal["checksum"] = "checksum"
    skip_tensor_list: list[str] | None = None


@dataclass(slots=True)
class OpenUpdate:
    """The received part of an update."""

    name: str
    received: list[tuple[Tensor, list[Entry]]] = field(default_factory=list)
    broken: bool = False
    flush: bool = False
    version: str | None = None

    def check(self, name: str) -> None:
        """Raise ValueError if `name` is not this update's name."""
        if self.name and name != self.name:
            raise ValueError(f"the update under way is {self.name[:100]!r}, not {name[:100]!r}")


class WeightUpdates:
    """Handlers of the routes for weights. `on_model` runs a function on the thread that owns the model, between two
    steps."""

    def __init__(
        self, model: Any, scheduler: Scheduler, on_model: Callable[[Any], Awaitable[Any]], *, timeout_s: float
    ) -> None:
        self.loader = WeightLoader(model)
        self.adapters = AdapterLoader(self.loader)
        self._scheduler, self._on_model, self._timeout_s = scheduler, on_model, timeout_s
        self._groups: dict[str, Any] = {}
        self._open: OpenUpdate | None = None
        self._claim: ClaimBody | None = None
        self._claimed_at = 0.0

    def routes(self) -> dict[str, Handler]:
        return {
            f"POST {CLAIM_ROUTE}": self.claim,
            "POST /init_weights_update_group": self.init_group,
            "POST /destroy_weights_update_group": self.destroy_group,
            "POST /begin_weight_update": self.begin,
            "POST /update_weights_from_distributed": self.update,
            "POST /end_weight_update": self.end,
            "POST /update_weight_version": self.rename,
            "POST /get_weights_by_name": self.get,
            "POST /weights_checker": self.check,
        }

    def close(self) -> None:
        self._groups.clear()

    async def claim(self, body: ClaimBody) -> dict[str, Any]:
        """Let a learner publish to this engine, unless another run's learner is alive."""
        heard_s, held = time.monotonic() - self._claimed_at, self._claim
        if held is not None and held.token != body.token and heard_s < CLAIM_S:
            raise HttpError(
                409,
                f"run {held.run!r} publishes to this engine, and was heard of {heard_s:.0f} s ago: end it, or give run "
                f"{body.run!r} engines of its own",
            )
        if held is not None and held.token != body.token:
            log.warning("run %r publishes to this engine now; run %r did before", body.run, held.run)
        self._claim, self._claimed_at = (None if body.ends else body), time.monotonic()
        return {"success": True, "message": f"run {body.run}"}

    async def init_group(self, body: InitGroupBody) -> dict[str, Any]:
        name = body.group_name
        if name in self._groups:
            raise ValueError(f"the group {name!r} exists: destroy it first")
        earlier = tuple(self._groups)  # groups joined meanwhile are newer and stay
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
        """Break up groups on another thread, since aborting or freeing a group may wait for the network."""
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
        update.broken = True  # until the bucket is received; it stays so if the body cannot be read
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
        """Return the device for this group's buckets: gloo's arrive in the host's memory, even for a model on a GPU."""
        return torch.device("cpu") if DEVICES[group.name()] == "cpu" else self.loader.device

    async def end(self, body: EndBody) -> dict[str, Any]:
        """Install the update; one that failed, or is ended with `discard`, changes nothing."""
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
            except BaseException:  # some weights are new and some old: no version describes this mixture
                self._scheduler.weights_changed(UNTRAINED, flush=True)
                raise
            self._scheduler.weights_changed(version, update.flush)

        await self._on_model(install)
        return {"success": True, "message": f"weights {self._scheduler.weight_version}"}

    async def rename(self, body: RenameBody) -> dict[str, Any]:
        """Give the weights another name. The KV cache is dropped: nobody knows who gives the name, and why."""
        await self._on_model(lambda: self._scheduler.weights_changed(body.new_version, flush=True))
        return {"success": True, "message": f"weights {self._scheduler.weight_version}"}

    async def get(self, body: NameBody) -> list[Any]:
        return await self._on_model(lambda: self.loader.get(body.name, body.truncate_size))

    async def check(self, body: CheckBody) -> dict[str, Any]:
        """Answer checksums as SGLang computes them, for every parameter whose name contains no fragment in
        `skip_tensor_list`."""
        taken = await self._on_model(lambda: self.loader.snapshot(body.skip_tensor_list or ()))
        checksums_by_name = await in_thread(lambda: checksums((name, raw_bytes(values)) for name, values in taken))
        return {"success": True, "message": "Success.", "ranks": [{"checksums": checksums_by_name}]}
