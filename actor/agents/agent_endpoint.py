"""The HTTP server of an actor's agents: one base URL for each episode that is played. It is on loopback, or, for agents
elsewhere (`remote_agents`), where the recipe says.

    POST {base_url}/chat/completions        POST {base_url}/messages        GET {base_url}/models

A base URL holds a secret, which stands for the episode and for the right to ask. Whatever a client does is answered
with an error in its API's form, counted, and costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from actor.agents.agent_session import AgentSession, ended
from actor.agents.api_forms import FORMS, form_of
from actor.agents.chat_answers import models
from actor.agents.dialogues import Refused, object_in
from actor.agents.remote_agents import PostedResults, RemoteAgents, unauthorised, wait_in
from shared.util.http_connections import ConnectionLimit, is_foreign_host
from shared.util.process_memory import give_back_soon
from shared.util.refusals import Refusals
from shared.util.user_errors import describe

HOST = "127.0.0.1"
MODELS, RESULT = "/models", "/result"
LEASE = "/lease"  # beside the base URLs
ROUTES = {**dict.fromkeys(FORMS, "POST"), MODELS: "GET"}
MAX_CONNECTIONS, RESERVED_CONNECTIONS = 4096, 3072  # in all; of them for those who have named a session
MAX_SESSION_CONNECTIONS = 64
KEEP_ALIVE_S = 75.0
LINGER_S = 1.0  # for the rest of a body that is not read
MAX_BODY_BYTES = 128 << 20  # a client sends all images of its episode again with each call
MAX_READING_BYTES = 512 << 20  # of all bodies being read at the same time
READ_S = 60.0  # time limit for reading one body
MAX_VALUES = 2**18  # of one body, counted before it is decoded; each takes at most 200 bytes
KEPT_ENDED = 1024  # sessions whose calls after the end are told apart from those of no session
log = logging.getLogger("actor")


@dataclass(slots=True, eq=False)
class _Served:
    """An open session, the short name of its answers, and the connections that have named it."""

    session: AgentSession
    name: str
    connections: set[Any] = field(default_factory=set)


class AgentEndpoint:
    """Serves the sessions that are open. It listens from the first one on."""

    def __init__(
        self,
        host: str = HOST,
        port: int = 0,
        *,
        api_key: str = "",
        remote: RemoteAgents | None = None,
        results: PostedResults | None = None,
    ) -> None:
        """Prepare it. `port` 0: any that is free. `remote`: what agents elsewhere lease, with the key `api_key`.
        `results`: what agents in other processes post, also those that lease nothing."""
        self.remote, self.results = remote, remote.results if remote else results
        self._host, self._port, self._api_key = host, port, api_key
        self.refusals = Refusals("an agent's request", log)
        self._entries: dict[str, _Served] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._starting = asyncio.Lock()
        self._listener: asyncio.Server | None = None
        self._server: web.Server | None = None
        self._limit = ConnectionLimit(MAX_CONNECTIONS, RESERVED_CONNECTIONS)
        self._reading = 0  # total size of the bodies being read

    async def listen(self) -> None:
        """Listen from now on, if agents elsewhere may call. Raise ValueError if the address cannot be had."""
        if self.remote is None:
            return
        try:
            await self._begin()
        except OSError as error:
            words = f"rollout.listen: cannot listen on {self._host} port {self._port}: {error.strerror or error}"
            raise ValueError(f"{words}; choose another one") from error
        log.info("agents elsewhere lease episodes at http://%s:%d%s", self._host, self._port, LEASE)

    async def _begin(self) -> None:
        async with self._starting:
            if self._listener is None:
                await self._start()

    async def open(self, session: AgentSession) -> str:
        """Return the base URL under which the session is served until `end`. Raise OSError if no port is free."""
        await self._begin()
        secret = secrets.token_urlsafe(24)
        self._entries[secret] = _Served(session, secrets.token_hex(6))
        return f"http://{self._host}:{self._port}/{secret}/v1"

    def end(self, base_url: str) -> None:
        """End the session of a base URL: its calls that are open are answered with an error, and so are later ones."""
        secret = secret_of(base_url)
        entry = self._entries.pop(secret)
        entry.session.close()
        self._ended[secret] = None
        while len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._listener is not None and self._server is not None:
            self._listener.close()
            for connection in self._server.connections:
                connection.force_close()
            await self._server.shutdown(timeout=1.0)

    async def _start(self) -> None:
        leave_out_proxies()
        self._server = web.Server(
            self._respond,
            handler_cancellation=True,
            logger=_EndpointLog(self.refusals),
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self._limit.watch(self._server)
        self._listener = await asyncio.get_running_loop().create_server(
            self._server, self._host, self._port, backlog=1024
        )
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        entry: _Served | None = None
        try:
            self._limit.note_request(request)
            if self.remote is not None and request.path == LEASE:
                return await self._lease(request, self.remote)
            entry, route = self._entry(request)
            return await self._answer(request, entry, route)
        except Refused as refusal:
            return self._refused(request, entry, refusal)
        except Exception as error:  # noqa: BLE001 - its traceback is logged
            return self._refused(request, entry, Refused(500, "internal_error", describe(error)), error)

    def _entry(self, request: web.BaseRequest) -> tuple[_Served, str]:
        """Return the session that a request names, and what it asks of it."""
        _, _, rest = request.path.partition("/")
        secret, _, route = rest.partition("/v1")
        route = route.removeprefix("/v1")  # Anthropic's client adds this to its base URL, OpenAI's does not
        entry = self._entries.get(secret)
        if entry is None and secret in self._ended:
            raise ended()
        if entry is None:
            raise Refused(
                404, "session_not_found", "no episode has this base URL: use the one that the agent was given"
            )
        self._limit.authorise(request)
        entry.session.renew()
        entry.connections = {each for each in entry.connections if each.transport is not None}
        if request.protocol not in entry.connections and len(entry.connections) >= MAX_SESSION_CONNECTIONS:
            words = f"this episode has {MAX_SESSION_CONNECTIONS} connections: close those that are not used"
            raise Refused(429, "too_many_connections", words)
        entry.connections.add(request.protocol)
        routes = ROUTES if self.results is None else {**ROUTES, RESULT: "POST"}
        if route not in routes:
            raise Refused(404, "unknown_url", f"{route[:100]} is not served here; {', '.join(routes)} are")
        if request.method != routes[route]:
            raise Refused(405, "method_not_allowed", f"{request.method[:20]} {route}: send a {routes[route]}")
        return entry, route

    async def _answer(self, request: web.BaseRequest, entry: _Served, route: str) -> web.StreamResponse:
        session, created = entry.session, int(entry.session.started)
        if route == MODELS:
            return _json(models(created))
        if route == RESULT and self.results is not None:
            if not self.results.report(secret_in(request.path), object_in(await self._body(request))):
                raise ended()
            return _json({"taken": True})
        form = FORMS[route]
        asked, reply = await session.answer(await self._body(request), form.read)
        if not asked.stream:
            return _json(form.whole(entry.name, created, asked, reply))
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        with suppress(ConnectionError):  # the client has left
            await response.prepare(request)
            for event in form.streamed(entry.name, created, asked, reply):
                await response.write(event)
            await response.write_eof()
        return response

    async def _lease(self, request: web.BaseRequest, remote: RemoteAgents) -> web.StreamResponse:
        """Give the caller the next episode, or none after the time for which it wants to wait."""
        if request.method != "POST":
            raise Refused(405, "method_not_allowed", f"{request.method[:20]} {LEASE}: send a POST")
        if self._api_key:
            given = request.headers.get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
                raise unauthorised()
        elif "origin" in request.headers or is_foreign_host(request, frozenset()):
            raise Refused(403, "forbidden", "without a key only programs on this machine are served")
        self._limit.authorise(request)
        body = await self._body(request)
        call = await remote.lease(wait_in(object_in(body) if body else {}))
        if call is None:
            return web.Response(status=204)
        base_url = f"http://{request.headers.get('host') or f'{self._host}:{self._port}'}/{call.secret}/v1"
        limits = self._entries[call.secret].session.limits
        times = {"lease_s": limits.env_timeout_s, "timeout_s": limits.rollout_timeout_s}
        return _json({"base_url": base_url, **call.described(), **times})

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Read the body, with or without a Content-Length, if there is room for it beside those being read."""
        if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
            raise Refused(413, "too_large", f"a body of more than {MAX_BODY_BYTES} bytes")
        body = bytearray()
        try:
            async with asyncio.timeout(READ_S):
                async for part in request.content.iter_any():
                    if len(body) + len(part) > MAX_BODY_BYTES:
                        raise Refused(413, "too_large", f"a body of more than {MAX_BODY_BYTES} bytes")
                    if self._reading + len(part) > MAX_READING_BYTES:
                        raise Refused(503, "busy", f"bodies of {MAX_READING_BYTES} bytes are being read already")
                    self._reading += len(part)
                    body += part
        except TimeoutError:
            raise Refused(408, "body_timeout", f"the body did not come within {READ_S:g} s") from None
        finally:
            self._reading -= len(body)
        if len(body) > MAX_VALUES and body.count(b",") >= MAX_VALUES:
            raise Refused(413, "too_large", f"a body of more than {MAX_VALUES} values")
        give_back_soon(len(body))
        return bytes(body)

    def _refused(
        self, request: web.BaseRequest, entry: _Served | None, refusal: Refused, failure: Exception | None = None
    ) -> web.Response:
        """Return the answer with an error, which is counted: at the endpoint, and at the episode that it names."""
        words = f"{request.method[:20]} …{request.path.partition('/v1')[2][:100]}: {str(refusal)[:300]}"
        self.refusals.add(request.remote or "", f"status_{refusal.status}", words, failure=failure)
        if entry is not None:
            entry.session.refused(refusal)
        response = _json(form_of(request.path).error(refusal), refusal.status)
        if refusal.status in (408, 413, 429, 503):
            response.force_close()  # what is left of its body is not read, and its connection is one less
        return response


def secret_of(base_url: str) -> str:
    """Return the secret in a base URL, which stands for its episode."""
    return base_url.split("/")[-2]


def secret_in(path: str) -> str:
    """Return the secret in the path of a request."""
    return path.split("/")[1]


def leave_out_proxies() -> None:
    """Keep clients in this process from asking a proxy, which the host's environment may name, for the endpoint."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        if HOST not in hosts:
            os.environ[name] = ",".join([*hosts, HOST])


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


class _EndpointLog(logging.Logger):
    """A logger that counts aiohttp's error messages about invalid HTTP requests as refusals."""

    def __init__(self, refusals: Refusals) -> None:
        super().__init__("actor.endpoint")
        self._refusals = refusals

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._refusals.add("", type(error).__name__, " ".join(str(error)[:1000].split()))
