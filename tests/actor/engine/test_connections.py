"""Whom the embedded engine's server keeps connected and answers: silent strangers, foreign hosts, and GET requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from actor.engine import http
from actor.engine.http import HttpServer
from shared.engine.engine_api import EngineClient, EngineError
from shared.util import http_connections
from tests.support.engines import ask
from tests.support.tiny import running_engine

KEY = "a-key-of-the-test-0123"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pong(body: dict[str, object]) -> dict[str, object]:
    return {"n": body.get("n")}


def served(use: Callable[[int, EngineClient, HttpServer], Awaitable[None]], key: str = KEY) -> None:
    async def main() -> None:
        server = HttpServer({"POST /ping": pong, "GET /health": pong}, api_key=key)
        port = await server.start("127.0.0.1", 0)
        try:
            async with EngineClient(f"http://127.0.0.1:{port}", api_key=key, connections=4) as client:
                await use(port, client, server)
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def is_closed(stream: Stream, limit_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            with suppress(ConnectionError):
                while await stream[0].read(1000):
                    pass
            return True
    return False


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(http, "RESERVED_CONNECTIONS", 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"POST /ping HTTP/1.1\r\nx"])
def test_strangers_who_hold_connections_keep_nobody_out_who_has_the_key(sent: bytes) -> None:
    async def use(port: int, client: EngineClient, server: HttpServer) -> None:
        assert await client.post("/ping", {"n": 0}) == {"n": 0}
        strangers: list[Stream] = []
        for number in range(40):
            strangers.append(await asyncio.open_connection("127.0.0.1", port))
            strangers[-1][1].write(sent)
            if number % 8 == 0:  # a client's connection that is already there stays
                assert await client.post("/ping", {"n": number}) == {"n": number}
        async with EngineClient(client.url, api_key=KEY) as other:  # and a new one finds room
            assert await other.post("/ping", {"n": 1}) == {"n": 1}
            await other.health()
        assert await is_closed(strangers[0], 5.0)  # the oldest went
        assert not await is_closed(strangers[-1], 0.2)
        assert len(server.connections) <= 20 and server.limit.num_closed >= 20
        for _, writer in strangers:
            writer.close()

    served(use)


@pytest.mark.parametrize("sent", [b"", b"POST /ping HTTP/1.1\r\nhost: 127.0.0.1\r\n"])
def test_the_head_of_a_first_request_has_a_time_limit(sent: bytes) -> None:
    async def use(port: int, client: EngineClient, server: HttpServer) -> None:
        server.limit._first_request_s = 0.5
        stranger = await asyncio.open_connection("127.0.0.1", port)
        stranger[1].write(sent)
        assert await client.post("/ping", {"n": 0}) == {"n": 0}
        assert await is_closed(stranger, 10.0)
        await asyncio.sleep(0.5)
        assert await client.post("/ping", {"n": 2}) == {"n": 2}
        stranger[1].close()

    assert http_connections.FIRST_REQUEST_S <= 30
    served(use)


async def status_of(port: int, host: str, path: str = "/ping", method: str = "POST") -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\n\r\n".encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


def test_a_foreign_host_is_refused_where_no_key_is_needed() -> None:
    async def use(port: int, client: EngineClient, server: HttpServer) -> None:
        for host in ("evil.example", "127.0.0.1.evil.example", "", "[", "10.1.2.3", "localhost@evil.example:80"):
            assert await status_of(port, host) in (400, 403), host
            assert await status_of(port, host, "/health", "GET") in (400, 403), host
        for host in (f"127.0.0.1:{port}", "localhost", f"LOCALHOST:{port}", "[::1]:80"):
            assert await status_of(port, host) == 200, host

    served(use, key="")


def test_an_engine_with_a_key_is_reached_under_any_name() -> None:
    async def use(port: int, client: EngineClient, server: HttpServer) -> None:
        assert await status_of(port, "node-7.cluster") == 401  # not 403: the key decides
        assert await status_of(port, "node-7.cluster", "/health", "GET") == 200

    served(use)


def test_nothing_is_changed_by_a_get_request(folder) -> None:
    with running_engine(folder) as (url, app):
        changing = [route.split()[1] for route in app.routes() if route.startswith("POST") and "health" not in route]
        assert "/flush_cache" in changing
        for path in changing:
            with pytest.raises(EngineError) as error:
                ask(url, lambda client, path=path: client.request("GET", path, timeout_s=10))
            assert error.value.status == 405, path
        ask(url, lambda client: client.post("/flush_cache", {}))
