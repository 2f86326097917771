"""Access control: requests for another host or from another site are refused; off loopback a token is required.

A page of another site can neither read this one (requests with a foreign Origin are refused) nor reach it under another
name (a foreign Host is refused). The token is given once in the address and then as a cookie, or as a bearer token; it
is compared in constant time. Served pages may load only from this server, and a run's texts are never treated as
markup.
"""

from __future__ import annotations

import hmac
import socket

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shared.util.http_connections import ConnectionLimit, is_foreign_host

COOKIE = "pronk_dashboard"
POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    )
)  # fmt: skip
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def guard(host: str, token: str, connections: ConnectionLimit) -> Middleware:
    """Return the middleware of a server that listens on `host`; without a token it answers everybody who reaches it.
    `connections` is told which connections have sent an authorised request."""
    names = frozenset({host.strip("[]").lower(), socket.gethostname().lower()})

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.note_request(request)
        if refused := why_refused(request, names):
            return with_headers(web.Response(status=403, text=f"refused: {refused}\n"))
        given = request.query.get("token", "")
        if token and request.path == "/" and matches(given, token):
            entered = web.Response(status=303, headers={"Location": "/"})
            entered.set_cookie(COOKIE, token, httponly=True, samesite="Strict")
            return with_headers(entered)
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and not (matches(request.cookies.get(COOKIE, ""), token) or matches(bearer, token)):
            message = "open the address with ?token=... that the dashboard printed when it started\n"
            return with_headers(web.Response(status=401, text=message))
        connections.authorise(request)
        try:
            return with_headers(await handler(request))
        except web.HTTPException as error:
            return with_headers(web.Response(status=error.status, text=f"{error.reason}\n"))

    return guarded


def why_refused(request: web.Request, names: frozenset[str]) -> str:
    """Return why a request is refused; "" if it may be answered."""
    if request.method not in ("GET", "HEAD"):
        return "nothing can be changed here"
    if is_foreign_host(request, names):
        return "a foreign Host"
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.headers.get('Host')}":
        return "a foreign Origin"
    return ""


def matches(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def with_headers(response: web.StreamResponse) -> web.StreamResponse:
    response.headers.update(HEADERS)
    return response
