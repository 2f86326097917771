"""A small HTTP/1.1 server on asyncio: JSON in, JSON out, connections kept alive. Bounded in every dimension.

Made for many small requests on a shared core: one protocol object per connection, no middleware.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

log = logging.getLogger("engine")
MAX_HEADER_BYTES = 32 * 1024
MAX_CONNECTIONS = 4096
OPEN_PATHS = ("/health",)  # answered to everybody, as SGLang does

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class HttpError(Exception):
    """An answer with an error status; `str(error)` is its one-line message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """Routes "METHOD /path" to async handlers, which take the decoded JSON body and return what to send as JSON.

    With an `api_key` a request must carry it ("authorization: Bearer KEY"), else it is answered 401, its body unread.
    """

    def __init__(self, routes: dict[str, Handler], *, api_key: str = "", max_body_bytes: int = 64 * 2**20) -> None:
        self.routes, self.max_body_bytes = routes, max_body_bytes
        self._api_key = api_key.encode()
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port (a free one for 0). OSError if it is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=1024)
        return self._server.sockets[0].getsockname()[1]

    def lets_in(self, path: str, authorization: str) -> bool:
        """Whether a request with this header may have an answer; takes the same time for every wrong key."""
        scheme, _, key = authorization.partition(" ")
        right = hmac.compare_digest(key.encode("latin-1"), self._api_key) and scheme.lower() == "bearer"
        return right or not self._api_key or path in OPEN_PATHS

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()

    async def respond(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """(status, JSON body) of one request. A handler's ValueError is the client's mistake: 400."""
        handler = self.routes.get(f"{method} {path}")
        try:
            if handler is None:
                known = any(route.endswith(f" {path}") for route in self.routes)
                raise HttpError(405 if known else 404, f"no {method} {path} here")
            content = json.loads(body) if body.strip() else {}
            if not isinstance(content, dict):
                raise HttpError(400, "the body must be a JSON object")
            return 200, json.dumps(await handler(content), separators=(",", ":")).encode()
        except HttpError as error:
            return error.status, _error(str(error))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return 400, _error(f"the body is not JSON: {error}")
        except ValueError as error:
            return 400, _error(str(error))
        except Exception as error:
            log.exception("%s %s failed", method, path)
            return 500, _error(f"{type(error).__name__}: {error}")


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


class _Connection(asyncio.Protocol):
    """One client: requests are answered one after the other, in order."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._server.connections) >= MAX_CONNECTIONS:
            transport.abort()
            return
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._next()

    def _next(self) -> None:
        """Starts on the next request once all of it is there."""
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_HEADER_BYTES:
                self._send(431, _error("the header is too long"), keep_alive=False)
            return
        try:
            method, path, headers = _parse_head(bytes(self._buffer[:end]))
            length = int(headers.get("content-length", "0"))
        except ValueError:
            self._send(400, _error("the request is not HTTP/1.1"), keep_alive=False)
            return
        if not self._server.lets_in(path, headers.get("authorization", "")):
            text = "no API key, or a wrong one: set engine.api_key_file to the engine's"
            self._send(401, _error(text), keep_alive=False)
            return
        if "transfer-encoding" in headers or not 0 <= length <= self._server.max_body_bytes:
            self._send(413, _error(f"send a Content-Length of at most {self._server.max_body_bytes}"), keep_alive=False)
            return
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        keep_alive = headers.get("connection", "").lower() != "close"
        self._task = asyncio.ensure_future(self._answer(method, path, body, keep_alive))

    async def _answer(self, method: str, path: str, body: bytes, keep_alive: bool) -> None:
        status, content = await self._server.respond(method, path, body)
        self._task = None
        self._send(status, content, keep_alive)
        if keep_alive and self._buffer:
            self._next()

    def _send(self, status: int, content: bytes, keep_alive: bool) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
        )
        self._transport.write(head.encode() + content)
        if not keep_alive:
            self._transport.close()


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    method, target, version = lines[0].split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return method, target.partition("?")[0], headers
