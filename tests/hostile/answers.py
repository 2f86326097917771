"""A proxy before one engine that bends some of its answers: to the actors, and to the learner."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy

import aiohttp
from aiohttp import web

from tests.fuzz.mutations import nodes
from tests.hostile.requests import ODD

SHARE = 0.015  # of the answers
PROOFS = ("/weights_checker", "token_ids_logprob")  # other numbers in a sound answer would have the engine left out
DRIP_S = 2.0
MAX_BODY = 2**26
Bend = Callable[[bytes, random.Random], tuple[int, bytes]]


def cut_off(answer: bytes, rng: random.Random) -> tuple[int, bytes]:
    return 200, answer[: rng.randrange(len(answer) + 1)]


def failed(answer: bytes, rng: random.Random) -> tuple[int, bytes]:
    bodies = (answer, b"", b"<html>", b'{"error": {"message": [' + b"[" * 10_000, b'{"error": 5}', b"x" * 2**20)
    return rng.choice((100, 204, 302, 400, 404, 429, 500, 503, 599)), rng.choice(bodies)


def another(answer: bytes, rng: random.Random) -> tuple[int, bytes]:
    odd = (
        b"",
        b"null",
        b"[]",
        b"0",
        b"true",
        b'""',
        b"{}",
        b"NaN",
        b"\xff\xfe",
        b"[" * 100_000,
        b"9" * 10_000,
        b"{" * 100,
    )
    return 200, rng.choice(odd)


def huge(answer: bytes, rng: random.Random) -> tuple[int, bytes]:
    return 200, answer[:-1] + b" " * rng.choice((2**20, 2**23)) + answer[-1:]


def bent(answer: bytes, rng: random.Random) -> tuple[int, bytes]:
    """One or two places replaced or removed."""
    try:
        tree = json.loads(answer)
    except ValueError:
        return 200, answer[::-1]
    for _ in range(rng.randint(1, 2)):
        if places := nodes(tree):
            container, key = rng.choice(places)
            if rng.random() < 0.8:
                container[key] = deepcopy(rng.choice(ODD))  # type: ignore[index]
            else:
                del container[key]  # type: ignore[arg-type]
    return 200, json.dumps(tree).encode()


class BendingProxy:
    """Passes requests on to `engine`. While `bending` it spoils a share of the answers, or their connections."""

    def __init__(self, port: int, engine: str, seed: int) -> None:
        self.bending, self.share, self.bent = False, SHARE, Counter[str]()
        self._engine, self._random = engine, random.Random(f"{seed}/{port}")
        self.url = f"http://127.0.0.1:{port}"
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port, started), daemon=True)
        self._thread.start()
        started.wait(30.0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10.0)

    def _run(self, port: int, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(port, started))

    async def _serve(self, port: int, started: threading.Event) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=limit, auto_decompress=False) as self._session:
            server = web.Server(self._respond, access_log=None, handler_cancellation=True)
            listener = await self._loop.create_server(server, "127.0.0.1", port, backlog=512)
            started.set()
            await self._stopped.wait()
            listener.close()
            await server.shutdown(1.0)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        request._client_max_size = MAX_BODY  # no public way for the low-level server
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("authorization", "content-type")}
        try:
            async with self._session.request(
                request.method, self._engine + request.path_qs, data=body, headers=headers
            ) as answer:
                status, content = answer.status, await answer.read()
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.abort()
            raise
        if self.bending and self._random.random() < self.share:
            return await self._spoil(request, body, content)
        return web.Response(status=status, body=content, content_type="application/json")

    async def _spoil(self, request: web.BaseRequest, asked: bytes, content: bytes) -> web.StreamResponse:
        proof = request.path == PROOFS[0] or PROOFS[1].encode() in asked
        ways: list[Bend | str] = [cut_off, failed, another, huge, "hang up", "drip", "short"]
        way = self._random.choice(ways if proof else [*ways, bent, bent, bent])
        self.bent[way if isinstance(way, str) else way.__name__] += 1
        if not isinstance(way, str):
            status, content = way(content, self._random)
            return web.Response(status=status, body=content, content_type="application/json")
        transport = request.transport
        assert transport is not None
        if way != "hang up":
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content) + 1}\r\n\r\n"
            transport.write(head.encode())
            for byte in content[: int(10 * DRIP_S)] if way == "drip" else ():
                transport.write(bytes([byte]))
                await asyncio.sleep(0.1)
            with suppress(OSError):
                transport.write(content if way == "short" else b"")
        transport.close()
        raise asyncio.CancelledError  # nothing more is answered here
