"""A JSON server on aiohttp's low-level server: routes, API key, limits, errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints

import msgspec
from aiohttp import web

from shared.engine.sent_images import IMAGES_ROUTE
from shared.util.http_connections import ConnectionLimit, is_foreign_host
from shared.util.process_memory import give_back_soon
from shared.util.refusals import Refusals

log = logging.getLogger("engine")
MAX_CONNECTIONS, RESERVED_CONNECTIONS = 4096, 1024  # in all; of them for those who have shown the key
KEEP_ALIVE_S = 15.0  # longer than clients keep an idle connection
MAX_BODY_BYTES = 64 << 20
MAX_SMALL_BYTES = 4 << 20  # limit of the routes that are not LARGE
LARGE = ("POST /generate", f"POST {IMAGES_ROUTE}")
MAX_READING_BYTES = 512 << 20  # limit of all bodies being read at the same time
READ_S = 120.0  # time limit for reading one body
# Numbers, texts, lists and objects in a body, counted before it is decoded; each takes at most 200 bytes.
MAX_VALUES = 2**18
MAX_HEADERS, MAX_LINE_BYTES = 64, 4096  # headers of one request; bytes of each of its lines
OPEN_PATHS = ("/health",)  # answered without an API key, as SGLang does

Handler = Callable[[Any], Awaitable[Any]]
AnyObject = dict[str, Any]  # any JSON object


class HttpError(Exception):
    """An answer with an error status; `str(error)` is its one-line message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer(web.Server):
    """A server that maps routes "METHOD /path" to async handlers. A handler takes the body and returns the answer. The
    body is decoded from JSON to the type of the handler's parameter (a dict if it has no annotation); `bytes` is the
    raw body. With an `api_key`, a request must carry it ("authorization: Bearer KEY"), else it is answered 401 and its
    body is not read; without one, a request for another host's name is answered 403. A body may hold `MAX_VALUES` +
    `max_tokens` values. Every answer other than 200 is counted in `refusals`.
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        *,
        api_key: str = "",
        max_tokens: int = 2**20,
        refusals: Refusals | None = None,
    ) -> None:
        self.refusals = refusals or Refusals("a request", log)
        super().__init__(
            self._respond,
            handler_cancellation=True,
            logger=_HttpLog(self.refusals),
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
            auto_decompress=False,
            max_headers=MAX_HEADERS,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
        )
        self._routes = {
            route: (handler, _decoder(handler), MAX_BODY_BYTES if route in LARGE else MAX_SMALL_BYTES)
            for route, handler in routes.items()
        }
        self._max_values = MAX_VALUES + max_tokens
        self._reading = 0  # total size of the bodies being read
        self._api_key = api_key.encode()
        self._listener: asyncio.Server | None = None
        self._names = frozenset({socket.gethostname().lower()})
        self.limit = ConnectionLimit(MAX_CONNECTIONS, RESERVED_CONNECTIONS)
        self.limit.watch(self)

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port (a free one if `port` is 0). Raise OSError if it is taken."""
        self._names |= {host.strip("[]").lower()}
        self._listener = await asyncio.get_running_loop().create_server(self, host, port, backlog=1024)
        return self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in self.connections:
            connection.force_close()

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        failure: Exception | None = None
        try:
            answer, status = await self._answer(request), 200
        except HttpError as error:
            answer, status = _error(error), error.status
        except (ValueError, RecursionError) as error:  # the client's mistake; msgspec's errors are ValueErrors
            answer, status = _error(error), 400
        except Exception as error:  # noqa: BLE001 - its traceback is logged
            failure = error
            answer, status = _error(f"{type(error).__name__}: {error}"), 500
        if status != 200:
            words = f"{request.method} {request.path[:100]}: {answer['error']['message'][:300]}"
            self.refusals.add(request.remote or "", f"status_{status}", words, failure=failure)
        return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")

    async def _answer(self, request: web.BaseRequest) -> Any:
        self.limit.note_request(request)
        if "origin" in request.headers:
            raise HttpError(403, "a web page has no business here")
        if not self._api_key and is_foreign_host(request, self._names):
            raise HttpError(403, "a foreign Host: without an API key, use the address that the engine listens on")
        if not self._is_allowed(request):
            raise HttpError(401, "no API key, or a wrong one: set engine.api_key_file to the engine's")
        if request.path not in OPEN_PATHS:
            self.limit.authorise(request)
        route = self._routes.get(f"{request.method} {request.path}")
        if route is None:
            path_exists = any(name.endswith(f" {request.path}") for name in self._routes)
            raise HttpError(405 if path_exists else 404, f"no {request.method} {request.path} here")
        length = request.content_length if request.can_read_body else 0
        handler, decoder, most = route
        if length is None or length > most:
            raise HttpError(413, f"send a Content-Length of at most {most}")
        if decoder is None:
            return await handler(await self._body(request, length))
        if request.path in OPEN_PATHS or not length:
            return await handler(decoder.decode(b"{}"))
        body = await self._body(request, length)
        if length > self._max_values and body.count(b",") >= self._max_values:
            raise HttpError(413, f"a body of more than {self._max_values} values")
        return await handler(decoder.decode(body))

    async def _body(self, request: web.BaseRequest, length: int) -> bytes:
        """Read the body, if there is room for it beside those being read. The caller decodes it without awaiting
        anything, so that only one is decoded at a time."""
        if self._reading + length > MAX_READING_BYTES:
            raise HttpError(503, f"bodies of {MAX_READING_BYTES} bytes are being read already")
        self._reading += length
        try:
            async with asyncio.timeout(READ_S):
                body = await request.content.read()
        except TimeoutError:
            raise HttpError(408, f"the body did not come within {READ_S:g} s") from None
        finally:
            self._reading -= length
        give_back_soon(length)  # including the decoded values
        return body

    def _is_allowed(self, request: web.BaseRequest) -> bool:
        """Tell whether the request carries the API key, if it needs one; takes the same time for every wrong key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(key.encode(errors="surrogateescape"), self._api_key) and scheme.lower() == "bearer"
        return right or not self._api_key or request.path in OPEN_PATHS


class _HttpLog(logging.Logger):
    """A logger that counts aiohttp's error messages about invalid HTTP requests as refusals."""

    def __init__(self, refusals: Refusals) -> None:
        super().__init__("engine.http")
        self._refusals = refusals

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            peer = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
            self._refusals.add(peer, type(error).__name__, " ".join(str(error)[:1000].split()))


def _decoder(handler: Handler) -> msgspec.json.Decoder[Any] | None:
    """Return the decoder of a handler's body; None if it takes bytes."""
    hints = {name: kind for name, kind in get_type_hints(handler).items() if name != "return"}
    kind = next(iter(hints.values()), dict[str, Any])
    return None if kind is bytes else msgspec.json.Decoder(kind)


def _error(message: object) -> dict[str, Any]:
    return {"error": {"message": str(message)}}
