"""JSON over HTTP for event loops: kept-alive connections, and a limit on every wait and on every answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from shared.guards.memory import give_back_soon
from shared.http_line import Line

CONNECT_S = 10.0
KEEP_ALIVE_S = 4.0  # uvicorn, SGLang's server, closes a connection that was idle for 5 s
MAX_TYPED_BYTES = 64 << 20  # of an answer of a known type, which takes no more memory than its bytes
MAX_ANSWER_BYTES = 8 << 20  # of any other JSON, which takes up to 25 times as much
MAX_ERROR_BYTES = 64 << 10
HEADERS = {"content-type": "application/json"}
FILE_HEADERS = {"content-type": "application/octet-stream"}


class HttpFailure(Exception):
    """No usable answer from `url`, with the reason in one line. `status` is 0 without an answer; `sent` says whether
    the server may have seen the request."""

    def __init__(self, url: str, reason: str, status: int = 0, *, sent: bool = True) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason, self.status, self.sent = url, reason, status, sent

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered later: there was no answer, or the server was busy or in trouble."""
        return self.status in (0, 429) or self.status >= 500


class CannotConnect(Exception):
    """Nobody listens."""


class JsonClient:
    """Requests to one base URL, at most `connections` at once; the others wait their turn inside their time limit.

    Each carries the `api_key` when there is one. No redirect is followed and no proxy is used: a server that points
    elsewhere has failed. The client belongs to the event loop of its first request; `close` it there, or enter it.
    """

    failure = HttpFailure

    def __init__(self, url: str, *, connections: int = 512, api_key: str = "") -> None:
        """ValueError for what is no URL of a host."""
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if not host or parts.scheme not in ("http", "https"):
            raise ValueError(f"url {url!r}: write it as http://host:port")
        host = f"[{host}]" if ":" in host else host
        self._address = (parts.hostname or "", port or 80) if parts.scheme == "http" else None
        self._host, self._path = f"{host}{f':{port}' if port else ''}", parts.path.rstrip("/")
        self._base = f"{parts.scheme}://{self._host}{self._path}"
        self._headers = HEADERS | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._lines: list[Line] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, answer: type | None = None
    ) -> Any:
        """The decoded JSON of a 2xx answer (None when it is empty), checked against the type `answer` where one is
        given. The body is sent as JSON, bytes as they are. `failure` for any other answer, and after `timeout_s`."""
        is_file = isinstance(body, bytes | memoryview)
        data = body if body is None or is_file else msgspec.json.encode(body)
        headers = FILE_HEADERS if is_file else None
        found = await self._exchange(method, path, data, timeout_s, answer is not None, headers)
        return self._decoded(path, *found, answer)

    async def post_content(self, path: str, content: bytes, *, timeout_s: float) -> Any:
        """As `request`, of a body that is JSON already, over connections of its own that cost less."""
        if self._address is None:
            return self._decoded(path, *await self._exchange("POST", path, content, timeout_s))
        with self._failing(path, timeout_s):
            async with asyncio.timeout(timeout_s):
                line = await self._line(*self._address)
                status, answer = await line.post(self._head(path, len(content)), content)
        return self._decoded(path, self._good(path, status, answer), answer)

    def _decoded(self, path: str, status: int, content: bytes, answer: type | None = None) -> Any:
        try:
            if answer is not None:
                return msgspec.json.decode(content, type=answer)
            return json.loads(content) if content.strip() else None
        except msgspec.ValidationError as error:
            raise self.failure(self.url, f"{path}: the answer is wrong: {error}", status) from None
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise self.failure(self.url, f"{path}: the answer is not JSON", status) from None

    async def close(self) -> None:
        for line in self._lines:
            line.close()
        if self._session is not None:
            await self._session.close()

    async def _exchange(
        self,
        method: str,
        path: str,
        data: bytes | memoryview | None,
        timeout_s: float,
        typed: bool = False,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """(status, body) of a 2xx answer. `data` goes as it is, as a JSON text unless `headers` say otherwise."""
        if self._session is None:
            self._session = self._open()
        with self._failing(path, timeout_s):
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self._base + path, data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                status = response.status
                limit = (MAX_TYPED_BYTES if typed else MAX_ANSWER_BYTES) if response.ok else MAX_ERROR_BYTES
                try:
                    content = await response.content.readexactly(limit + 1)
                except asyncio.IncompleteReadError as ended:
                    content = ended.partial
        give_back_soon(len(content))
        self._good(path, status, content)
        if len(content) > limit:
            raise self.failure(self.url, f"{path}: the answer has more than {limit} bytes", status)
        return status, content

    def _good(self, path: str, status: int, content: bytes) -> int:
        """The status, if it is one of success."""
        if not 200 <= status < 300:
            raise self.failure(self.url, f"{path}: HTTP {status}: {_message(content)}", status)
        return status

    @contextmanager
    def _failing(self, path: str, timeout_s: float) -> Iterator[None]:
        """Whatever is raised is a `failure`."""
        try:
            yield
        except (CannotConnect, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ValueError) as error:
            raise self.failure(self.url, f"cannot connect: {_words(error)}", sent=False) from error
        except TimeoutError:
            raise self.failure(self.url, f"{path}: no answer within {timeout_s:g} s") from None
        except Exception as error:  # of the connection, or of a parser that meets what is no HTTP
            raise self.failure(self.url, f"{path}: the connection broke: {_words(error)}") from error

    async def _line(self, host: str, port: int) -> Line:
        """One that is free; a new one where none is."""
        self._lines = [line for line in self._lines if line.is_open]
        if (free := next((line for line in self._lines if line.is_fresh(KEEP_ALIVE_S)), None)) is not None:
            return free
        try:
            line = await Line.open(host, port, MAX_ERROR_BYTES, CONNECT_S)
        except OSError as error:
            raise CannotConnect(_words(error)) from error
        self._lines.append(line)
        return line

    def _head(self, path: str, length: int) -> bytes:
        lines = [f"POST {self._path}{path} HTTP/1.1", f"host: {self._host}", f"content-length: {length}"]
        return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in self._headers.items()), "", ""]).encode()

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=self._headers,
            skip_auto_headers=("accept-encoding", "user-agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )


def _message(answer: bytes) -> str:
    """The server's own words, on one line."""
    try:
        content = json.loads(answer)
        error = content.get("error", content.get("message", content)) if isinstance(content, dict) else content
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        text = answer.decode(errors="replace")
    return " ".join(text.split())[:500]


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
