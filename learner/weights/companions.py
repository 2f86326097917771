"""Ranks of rank 0's host that are in the weight group too, so that NCCL sends over the links of all of their GPUs.

A ring of NCCL leaves a host over the links of those of its GPUs that are in the group. So rank 0 alone sends over one;
with the other ranks of its host beside it, which receive what they need not and throw it away, it sends over all.

A companion is spoken to as an engine is, by the same routes over loopback: whoever is silent is left out as one is.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
from aiohttp import web

from learner.distributed import Ranks, all_sum, broadcast_frames, ranks_of_host
from learner.weights.group import ABORT_S, WeightGroup
from shared.guards.threads import in_thread
from shared.log import get_logger

START_S = 30.0


class Companion:
    """On a rank that accompanies rank 0; it receives on a thread of its own."""

    def __init__(self, rank: int, device: int, timeout_s: float, key: str) -> None:
        """`device`: the rank's GPU. `key`: whoever does not know it is refused."""
        self._rank, self._device, self._timeout_s, self._key = rank, device, timeout_s, key
        self._groups: dict[str, WeightGroup] = {}
        self._routes = {
            "/health": self._health,
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._receive,
            "/destroy_weights_update_group": self._leave,
        }
        self.port = 0
        self._loop, self._listens = asyncio.new_event_loop(), threading.Event()
        threading.Thread(target=self._run, name="companion", daemon=True).start()
        if not self._listens.wait(START_S):
            raise TimeoutError(f"rank {rank} cannot listen to rank 0")

    def close(self) -> None:
        """Leaves its groups, within the time that breaking them up may take."""

        async def leave() -> None:
            groups, self._groups = self._groups, {}
            await asyncio.gather(*(group.abort() for group in groups.values()))

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(leave(), self._loop).result(2 * ABORT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ------------------------------------------------------------------ what it is made of

    def _run(self) -> None:
        self._loop.run_until_complete(self._listen())
        self._listens.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        serving = await self._loop.create_server(web.Server(self._answer, access_log=None), "127.0.0.1", 0)
        self.port = serving.sockets[0].getsockname()[1]

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        said = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(said, f"Bearer {self._key}".encode()):
            return web.Response(status=401)
        try:
            await self._routes[request.path](msgspec.json.decode(await request.read() or b"{}"))
        except Exception as error:  # noqa: BLE001  rank 0 says what it was
            get_logger("publisher").warning("rank %d: %s: %r", self._rank, request.path, error)
            return web.json_response({"error": " ".join(str(error).split())}, status=400)
        return web.json_response({"success": True})

    async def _health(self, body: dict[str, Any]) -> None:
        pass

    async def _join(self, body: dict[str, Any]) -> None:
        group = WeightGroup(
            body["group_name"],
            body["world_size"],
            body["backend"],
            self._timeout_s,
            self._device,
            rank=body["rank_offset"],
            port=body["master_port"],
        )
        self._groups[group.name] = group
        await in_thread(group.connect)

    async def _receive(self, body: dict[str, Any]) -> None:
        group = self._groups[body["group_name"]]
        kinds = zip(body["dtypes"], body["shapes"], strict=True)
        size = sum(getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in kinds)
        await in_thread(lambda: group.broadcast(torch.empty(size, dtype=torch.uint8, device=group.device)))

    async def _leave(self, body: dict[str, Any]) -> None:
        if (group := self._groups.pop(body["group_name"], None)) is not None:
            await group.abort()


def companions_of(ranks: Ranks, count: int, timeout_s: float) -> tuple[Companion | None, Sequence[str], str]:
    """The first `count` ranks of rank 0's host, it included: this rank's own end, if it is one of the others; on rank 0
    their URLs, and the key that they want. A collective."""
    count = min(count, ranks_of_host(ranks))
    if not ranks.size > 1 < count:
        return None, (), ""
    (secret,) = broadcast_frames([os.urandom(16).hex().encode()] if ranks.is_main else None, ranks)
    key, own = bytes(secret).decode(), None
    if 0 < ranks.rank < count:
        own = Companion(ranks.rank, ranks.device.index or 0, timeout_s, key)
    ports = torch.zeros(count, dtype=torch.int64)
    if own is not None:
        ports[ranks.rank] = own.port
    told = all_sum(ports, ranks).tolist()[1:]
    return own, [f"http://127.0.0.1:{port}" for port in told] if ranks.is_main else (), key
