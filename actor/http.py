"""A lean HTTP/1.1 client on asyncio streams: JSON posts over a pool of kept-alive connections.

For hundreds of small requests a second on a core that the model needs too; nothing here waits without a limit.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 4.0  # uvicorn, SGLang's server, closes a connection that was idle for 5 s
MAX_RESPONSE_BYTES = 256 * 2**20


class HttpFailure(Exception):
    """No usable answer. `sent` says whether the server may have seen the request; `status` is 0 without an answer."""

    def __init__(self, message: str, *, sent: bool, status: int = 0) -> None:
        super().__init__(message)
        self.sent, self.status = sent, status


class HttpClient:
    """Requests to one base URL, at most `connections` at once; the others wait their turn inside their time limit.

    Each carries the `api_key` when there is one.
    """

    def __init__(self, url: str, *, connections: int = 512, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r}: write it as http://host:port")
        self.url = url.rstrip("/")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: deque[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self._limit = asyncio.Semaphore(connections)

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """The decoded JSON of a 2xx answer (None when empty). HttpFailure otherwise, and after `timeout_s`."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"{method} {self._prefix + path or '/'} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"{self._authorization}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(timeout_s), self._limit:
                status, answer = await self._exchange(head.encode() + content)
        except TimeoutError:
            raise HttpFailure(f"{self.url}{path}: no answer within {timeout_s:g} s", sent=True) from None
        if not 200 <= status < 300:
            raise HttpFailure(f"{self.url}{path}: HTTP {status}: {_message(answer)}", sent=True, status=status)
        try:
            return json.loads(answer) if answer.strip() else None
        except ValueError:
            raise HttpFailure(f"{self.url}{path}: the answer is not JSON", sent=True, status=status) from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[2].close()

    async def _exchange(self, message: bytes) -> tuple[int, bytes]:
        reader, writer = await self._connection()
        reusable = False
        try:
            writer.write(message)
            await writer.drain()
            status, headers = await _read_head(reader)
            answer = await _read_body(reader, headers)
            reusable = headers.get("connection", "").lower() != "close"
            return status, answer
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise HttpFailure(f"{self.url}: the connection broke: {error}", sent=True) from error
        finally:
            if reusable:
                self._idle.append((time.monotonic(), reader, writer))
            else:
                writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < KEEP_ALIVE_S and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(self._host, self._port, limit=2**20, ssl=self._secure or None)
        except (OSError, TimeoutError) as error:
            raise HttpFailure(f"{self.url}: cannot connect: {error or 'timeout'}", sent=False) from error


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ", 2)[1])
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if lines[0].startswith("HTTP/1.0"):
        headers.setdefault("connection", "close")
    return status, headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(_checked(int(headers.get("content-length", "0"))))
    parts: list[bytes] = []
    total = 0
    while size := int((await reader.readline()).split(b";")[0], 16):
        total = _checked(total + size)
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


def _checked(size: int) -> int:
    if not 0 <= size <= MAX_RESPONSE_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return size


def _message(answer: bytes) -> str:
    """The server's own words, on one line."""
    try:
        content = json.loads(answer)
        error = content.get("error", content.get("message", content)) if isinstance(content, dict) else content
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except ValueError:
        text = answer.decode(errors="replace")
    return " ".join(text.split())[:500]
