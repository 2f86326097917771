"""Many engines in one process: each answers HTTP, is a rank of weight groups, and discards received weights. They use
as little CPU as possible, so that measurements show the learner.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from actor.engine.weight_loader import broadcast, join_group

LIMIT_S = 120.0
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Engine:
    """One false engine. Routes that wait for other ranks run on its own thread."""

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        self.num_connections = self.num_received = 0
        self.waits = {
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.receive,
            "/receive_bare": self.receive_bare,
        }

    def _run(self) -> None:
        """Handle one request after another, as a server's model process does."""
        while True:
            self.work.get()()

    def join(self, body: dict[str, Any]) -> None:
        self.groups[body["group_name"]] = join_group(
            address=body["master_address"],
            port=body["master_port"],
            rank=body["rank_offset"],
            world_size=body["world_size"],
            name=body["group_name"],
            backend=body["backend"],
            timeout_s=LIMIT_S,
        )

    def receive(self, body: dict[str, Any]) -> None:
        shapes = zip(body["dtypes"], body["shapes"], strict=True)
        size = sum(BYTES[dtype] * math.prod(shape) for dtype, shape in shapes)
        broadcast(self.groups[body["group_name"]], torch.empty(size, dtype=torch.uint8), LIMIT_S)
        self.num_received += 1

    def receive_bare(self, body: dict[str, Any]) -> None:
        """Join a group; from then on receive one bucket after another without further requests."""
        self.join(body)

        def run() -> None:
            while True:
                for size in body["sizes"]:
                    broadcast(self.groups[body["group_name"]], torch.empty(size, dtype=torch.uint8), 3600.0)

        threading.Thread(target=run, daemon=True).start()


class Connection(asyncio.Protocol):
    """A connection that answers one request after another with success."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.data = engine, b""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.loop = transport, asyncio.get_running_loop()
        self.engine.num_connections += 1

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, rest = self.data.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if not end or len(rest) < length:
            return
        self.data = rest[length:]
        path, body = head.split(b" ", 2)[1].decode(), rest[:length]
        if (wait := self.engine.waits.get(path)) is None:
            self.answer()
            return

        def run() -> None:
            wait(msgspec.json.decode(body))
            self.loop.call_soon_threadsafe(self.answer)

        self.engine.work.put(run)

    def answer(self) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n" + b'{"success":true}')


def serve_many(count: int, told: Any) -> None:
    """Serve for ever, after sending the ports to the pipe `told`."""
    torch.set_num_threads(1)
    serve([Engine() for _ in range(count)], told.send)


def serve(engines: Sequence[Engine], told: Callable[[list[int]], Any]) -> None:
    """Serve for ever, after calling `told` with the ports."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        servers = []
        for engine in engines:
            servers.append(await loop.create_server(lambda engine=engine: Connection(engine), "127.0.0.1", 0))
        told([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    asyncio.run(main())
