"""What tests need of this machine: a free port, an HTTP server, and waits that have a limit."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(done: Callable[[], object], timeout_s: float = 20.0, state: Callable[[], object] = str) -> None:
    """Returns as soon as `done()` holds, asked every 10 ms; AssertionError with `state()` if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s {state()}"
        time.sleep(0.01)


async def until_async(done: Callable[[], object], timeout_s: float = 20.0, state: Callable[[], object] = str) -> None:
    """`until` for a test whose event loop has to go on; asked every 5 ms."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s {state()}"
        await asyncio.sleep(0.005)


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class LocalServer:
    """Answers HTTP by `handler` on a free port of loopback, until it is closed."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
