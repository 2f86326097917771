"""Who may look: requests for another host or from another site are refused; beyond this machine a token is asked for.

A page of another site cannot read ours (no Origin of another is answered), nor reach us under a name of its own (no
foreign Host is). The token comes once in the address, then as a cookie, or as a bearer's; it is compared in constant
time. What is served may load from this server alone, and no text of a run is ever markup.
"""

from __future__ import annotations

import hmac
import socket
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
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


def guard(host: str, token: str) -> Middleware:
    """The middleware of a server that listens on `host`; without a token it answers whoever reaches it."""
    names = LOOPBACK | {host.strip("[]").lower(), socket.gethostname().lower()}

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if refused := why_refused(request, names):
            return with_headers(web.Response(status=403, text=f"refused: {refused}\n"))
        given = request.query.get("token", "")
        if token and request.path == "/" and matches(given, token):
            entered = web.Response(status=303, headers={"Location": "/"})
            entered.set_cookie(COOKIE, token, httponly=True, samesite="Strict")
            return with_headers(entered)
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and not (matches(request.cookies.get(COOKIE, ""), token) or matches(bearer, token)):
            said = "open the address with ?token=... that the dashboard printed when it started\n"
            return with_headers(web.Response(status=401, text=said))
        try:
            return with_headers(await handler(request))
        except web.HTTPException as error:
            return with_headers(web.Response(status=error.status, text=f"{error.reason}\n"))

    return guarded


def why_refused(request: web.Request, names: frozenset[str]) -> str:
    """Empty for a request that this server may answer."""
    if request.method not in ("GET", "HEAD"):
        return "nothing can be changed here"
    own = request.transport.get_extra_info("sockname") if request.transport else None
    known = names | {str(own[0]).lower()} if own else names
    if host_of(request.headers.get("Host", "")) not in known:
        return "a foreign Host"
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.headers.get('Host')}":
        return "a foreign Origin"
    return ""


def host_of(header: str) -> str:
    """The name without its port; empty for what is none."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def matches(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def with_headers(response: web.StreamResponse) -> web.StreamResponse:
    response.headers.update(HEADERS)
    return response
