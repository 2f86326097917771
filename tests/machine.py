"""What tests of sockets and processes need of this machine: a free port, and waits that have a limit."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(done: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Returns as soon as `done()` holds; asked every 10 ms."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)


async def until_async(done: Callable[[], object], timeout_s: float = 20.0) -> None:
    """`until` for a test whose event loop has to go on; asked every 5 ms."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(0.005)
