"""A JSON client over HTTP for asyncio: kept-alive connections, and limits on each wait and on the size of each
answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler

from shared.util.process_memory import give_back_soon

CONNECT_S = 10.0
KEEP_ALIVE_S = 4.0  # less than 5 s, after which uvicorn, SGLang's server, closes idle connections
MAX_TYPED_BYTES = 64 << 20  # an answer of a known type, which takes no more memory than its bytes
MAX_ANSWER_BYTES = 8 << 20  # any other JSON, which takes up to 25 times its bytes
MAX_ERROR_BYTES = 64 << 10
MAX_HEAD_BYTES = 1 << 20  # all bytes before the content, and what may come with them at once
HEADERS = {"content-type": "application/json"}
FILE_HEADERS = {"content-type": "application/octet-stream"}


class HttpFailure(Exception):
    """There was no usable answer from `url`; `reason` is one line. `status` is the HTTP status, 0 without an answer;
    `sent` is False if the server cannot have seen the request. `retry_after_s`: how long the server asks to wait
    before the next request, in seconds; 0 if it does not say."""

    retry_after_s = 0.0

    def __init__(self, url: str, reason: str, status: int = 0, *, sent: bool = True) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason, self.status, self.sent = url, reason, status, sent

    @property
    def may_pass(self) -> bool:
        """True if the same request may succeed later: there was no answer, or the server was busy or failed."""
        return self.status in (0, 429) or self.status >= 500


class BoundedConnection(ResponseHandler):
    """A connection that takes a bounded number of bytes for each answer. aiohttp bounds the lines of the head, but
    neither extensions of chunks nor interim answers (100 Continue), which may come without end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._taken, self._most = 0, MAX_HEAD_BYTES

    def set_response_params(self, **params: Any) -> None:
        super().set_response_params(**params)
        self._taken, self._most = 0, MAX_HEAD_BYTES

    def expect_content(self, limit: int) -> None:
        """Allow so many bytes of content, and as many again for the way in which it is cut into chunks."""
        self._most = MAX_HEAD_BYTES + 2 * limit

    def data_received(self, data: bytes) -> None:
        self._taken += len(data)
        if self._taken <= self._most:
            super().data_received(data)
            return
        self.set_exception(aiohttp.ClientPayloadError(f"an answer of more than {self._most} bytes in all"))
        if self.transport is not None:
            self.transport.abort()


class JsonClient:
    """Requests to one base URL, at most `connections` at once; further ones wait, within their time limit. Each carries
    the `api_key` if there is one. Redirects are not followed (they count as failures), and no proxy is used. The client
    belongs to the event loop of its first request; `close` it there, or enter it.
    """

    failure = HttpFailure

    def __init__(self, url: str, *, connections: int = 512, api_key: str = "") -> None:
        """Parse the URL. Raise ValueError unless it is an http or https URL with a host."""
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if not host or parts.scheme not in ("http", "https"):
            raise ValueError(f"url {url!r}: write it as http://host:port")
        host = f"[{host}]" if ":" in host else host
        self._base = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"
        self._headers = HEADERS | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float, answer: type | None = None
    ) -> Any:
        """Return the decoded JSON of a 2xx answer (None when it is empty), checked against the type `answer` if one is
        given. A body of bytes is sent as it is, any other as JSON. Raise `failure` for any other answer, and after
        `timeout_s`."""
        is_file = isinstance(body, bytes | memoryview)
        data = body if body is None or is_file else msgspec.json.encode(body)
        headers = FILE_HEADERS if is_file else None
        found = await self._exchange(method, path, data, timeout_s, answer is not None, headers)
        return self._decoded(path, *found, answer)

    async def post_content(self, path: str, content: bytes, *, timeout_s: float) -> Any:
        """Post a body that is already encoded as JSON; return and raise as `request` does."""
        return self._decoded(path, *await self._exchange("POST", path, content, timeout_s))

    async def post_for_content(self, path: str, content: bytes, content_type: str, *, timeout_s: float) -> bytes:
        """Post a body of any type; return the body of a 2xx answer as it is, and raise as `request` does."""
        return (await self._exchange("POST", path, content, timeout_s, True, {"content-type": content_type}))[1]

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
        """Return (status, body) of a 2xx answer. `data` is sent unchanged, with the content type of JSON unless
        `headers` has another."""
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
                if response.connection and isinstance(response.connection.protocol, BoundedConnection):
                    response.connection.protocol.expect_content(limit)
                try:
                    content = await response.content.readexactly(limit + 1)
                except asyncio.IncompleteReadError as ended:
                    content = ended.partial
        give_back_soon(len(content))
        if not 200 <= status < 300:
            failure = self.failure(self.url, f"{path}: HTTP {status}: {_message(content)}", status)
            failure.retry_after_s = _seconds(response.headers.get("retry-after", ""))
            raise failure
        if len(content) > limit:
            raise self.failure(self.url, f"{path}: the answer has more than {limit} bytes", status)
        return status, content

    @contextmanager
    def _failing(self, path: str, timeout_s: float) -> Iterator[None]:
        """Turn every exception into a `failure`."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ValueError) as error:
            raise self.failure(self.url, f"cannot connect: {_words(error)}", sent=False) from error
        except TimeoutError:
            raise self.failure(self.url, f"{path}: no answer within {timeout_s:g} s") from None
        except Exception as error:  # the connection broke, or the answer is not HTTP
            raise self.failure(self.url, f"{path}: the connection broke: {_words(error)}") from error

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEP_ALIVE_S)
        make: type[ResponseHandler] = BoundedConnection
        connector._factory = partial(make, asyncio.get_running_loop())
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=self._headers,
            skip_auto_headers=("accept-encoding", "user-agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )


def _seconds(text: str) -> float:
    """Return the seconds of a Retry-After header; 0 for a date, or anything else."""
    return float(text) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text.strip()) else 0.0


def _message(answer: bytes) -> str:
    """Return the error message in an answer, on one line."""
    try:
        content = json.loads(answer)
        error = content.get("error", content.get("message", content)) if isinstance(content, dict) else content
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        text = answer.decode(errors="replace")
    return " ".join(text.split())[:500]


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
