"""Rules for the connections of an HTTP server: how many it keeps, whom it closes when it is full, and by which names it
answers."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
FIRST_REQUEST_S = 20.0  # time limit of a new connection for the head of its first request


class ConnectionLimit:
    """Keeps at most `limit` connections of a server. Strangers are connections that have sent no authorised request:
    they have at most `limit` - `reserve` of them, and when there are more, the oldest of them is closed. So those who
    only hold connections never keep out those who send requests."""

    def __init__(self, limit: int, reserve: int, first_request_s: float = FIRST_REQUEST_S) -> None:
        self._limit, self._reserve, self._first_request_s = limit, reserve, first_request_s
        # Connections in the order in which they came; those without a first request have a timer that closes them.
        self._strangers: dict[Any, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        self._authorised: set[Any] = set()
        self.num_closed = 0  # strangers that were closed because there were too many

    def watch(self, server: web.Server) -> None:
        """Apply the limit to the connections that the server gets from now on."""
        made, lost = server.connection_made, server.connection_lost

        def connection_made(connection: Any, transport: asyncio.Transport) -> None:
            made(connection, transport)
            self._add(connection, transport)

        def connection_lost(connection: Any, error: BaseException | None = None) -> None:
            lost(connection, error)
            self._forget(connection)

        for name, method in (("connection_made", connection_made), ("connection_lost", connection_lost)):
            setattr(server, name, method)

    def note_request(self, request: web.BaseRequest) -> None:
        """Record that the head of a request has come."""
        if request.protocol in self._strangers:
            self._strangers[request.protocol][1].cancel()

    def authorise(self, request: web.BaseRequest) -> None:
        """Record that the request's connection belongs to somebody who may send it."""
        if request.protocol in self._strangers:
            self._forget(request.protocol)
            self._authorised.add(request.protocol)

    def _add(self, connection: Any, transport: asyncio.Transport) -> None:
        timer = asyncio.get_running_loop().call_later(self._first_request_s, transport.abort)
        self._strangers[connection] = transport, timer
        room = self._limit - max(self._reserve, len(self._authorised))
        while len(self._strangers) > max(0, room):
            oldest = next(iter(self._strangers))
            transport, _ = self._strangers[oldest]
            self._forget(oldest)
            self.num_closed += 1
            transport.abort()

    def _forget(self, connection: Any) -> None:
        self._authorised.discard(connection)
        if stranger := self._strangers.pop(connection, None):
            stranger[1].cancel()


def host_of(header: str) -> str:
    """Return the host name in a Host header, in lower case and without the port; "" if it is invalid."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def is_foreign_host(request: web.BaseRequest, names: frozenset[str]) -> bool:
    """Tell whether a request was sent to a host other than `names`, loopback and the address at which it arrived: a web
    page that has its own name point here (DNS rebinding) sends such requests."""
    address = request.transport.get_extra_info("sockname") if request.transport else None
    own = names | LOOPBACK | ({str(address[0]).lower()} if address else frozenset())
    return any(host_of(header) not in own for header in request.headers.getall("Host", [""]))
