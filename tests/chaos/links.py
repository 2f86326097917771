"""TCP proxies between one engine and all that call it: slow, cut, leading nowhere, dripping, or passing on all requests
but those that bring weights, each for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import suppress

FAULTS = {
    "late": "engine's line delayed",
    "cut": "engine's line cut",
    "nowhere": "engine's line half-open",
    "drip": "engine drips its answers",
    "deaf": "engine takes no weights",
}
OF_WEIGHTS = tuple(
    f"POST /{route}".encode()
    for route in (
        "init_weights_update_group",
        "begin_weight_update",
        "update_weights_from_distributed",
        "end_weight_update",
    )
)
LATE_S = 0.7  # of each piece
DRIP_S = 0.05  # of each byte
PIECE_BYTES = 2**16


class Link:
    """Listens on `port` of loopback and passes on to `target` there. A connection that was cut stays closed; one that
    was open while the line led nowhere never brings anything again."""

    def __init__(self, port: int, target: int) -> None:
        self.counts: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{port}"
        self._port, self._target = port, target
        self._until = dict.fromkeys(FAULTS, 0.0)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), daemon=True)
        self._thread.start()
        if not self._ready.wait(10.0):
            raise RuntimeError(f"no link listens on port {port}")

    def disturb(self, fault: str, seconds: float) -> None:
        self._until[fault] = time.monotonic() + seconds
        if fault == "cut":
            self._loop.call_soon_threadsafe(self._cut)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5.0)

    def _is(self, fault: str) -> bool:
        return self._until[fault] > time.monotonic()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self.counts[FAULTS["cut"]] += len(self._writers)

    async def _run(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, backlog=512)
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = {writer}
        self._writers.add(writer)
        try:
            if self._is("cut"):
                return
            with suppress(OSError):
                there_reader, there = await asyncio.open_connection("127.0.0.1", self._target)
                mine.add(there)
                self._writers.add(there)
                up = asyncio.create_task(self._pump(reader, there, "up"))
                down = asyncio.create_task(self._pump(there_reader, writer, "down"))
                await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
                up.cancel()
                down.cancel()
        finally:
            for each in mine:
                self._writers.discard(each)
                each.transport.abort() if self._is("cut") else each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        lost = False
        with suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                if lost or self._is("nowhere"):
                    self.counts[FAULTS["nowhere"]] += 1
                    lost = True
                    continue
                if self._is("deaf") and way == "up" and piece.startswith(OF_WEIGHTS):
                    self.counts[FAULTS["deaf"]] += 1
                    return
                if self._is("late"):
                    self.counts[FAULTS["late"]] += 1
                    await asyncio.sleep(LATE_S)
                while way == "down" and piece and self._is("drip"):
                    self.counts[FAULTS["drip"]] += 1
                    writer.write(piece[:1])
                    piece = piece[1:]
                    await asyncio.sleep(DRIP_S)
                writer.write(piece)
                await writer.drain()
