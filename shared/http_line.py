"""A kept HTTP/1.1 connection for posts whose bytes are there already: a fourth of what a whole client costs each.

Rank 0 posts every bucket to every engine, and all of them wait for the last of these posts. So the request is bytes
once for all, and of an answer only what decides is read: the status, and the content by its length or in chunks.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

MAX_HEAD_BYTES = 32 << 10


class WrongAnswer(Exception):
    """What came is no answer of HTTP/1.1, or a larger one than was allowed."""


class Line(asyncio.Protocol):
    """One connection: one request at a time. Methods belong to one event loop."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: of an answer's content."""
        self._most, self._data, self._used_s = most_bytes, bytearray(), time.monotonic()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None
        self._last = False  # the server closes after this answer
        self._ends_with_line: tuple[int, bytes] | None = None  # what has come of an answer without a length

    @staticmethod
    async def open(host: str, port: int, most_bytes: int, timeout_s: float) -> Line:
        """OSError, or TimeoutError, where nobody listens."""
        async with asyncio.timeout(timeout_s):
            _, line = await asyncio.get_running_loop().create_connection(lambda: Line(most_bytes), host, port)
        return line

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and not self._last

    def is_fresh(self, idle_s: float) -> bool:
        """Whether it is free, and a server that keeps idle connections for longer than `idle_s` still has it."""
        return self.is_open and self._answer is None and time.monotonic() - self._used_s < idle_s

    async def post(self, request: bytes, content: bytes) -> tuple[int, bytes]:
        """`request`: the line and the headers, with the content's length. (status, content) of the answer. OSError if
        the connection breaks, WrongAnswer; after either, and after a cancellation, the line is closed."""
        assert self._transport is not None and self._answer is None
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._transport.writelines((request, content))
            return await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            self._answer, self._used_s = None, time.monotonic()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ what asyncio calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._answer is None or self._answer.done():
            self.close()  # nobody has asked
            return
        try:
            found = self._read()
            if found is not None and self._ends_with_line is None:
                self._data.clear()
                self._answer.set_result(found)
        except (WrongAnswer, ValueError, IndexError) as error:
            self._answer.set_exception(WrongAnswer(f"the answer is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is None or self._answer.done():
            return
        if exc is None and self._ends_with_line:
            self._answer.set_result(self._ends_with_line)
        else:
            self._answer.set_exception(exc or ConnectionResetError("the server hung up"))

    # ------------------------------------------------------------------ what it is made of

    def _read(self) -> tuple[int, bytes] | None:
        """The answer, once all of it is there."""
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            if len(self._data) > MAX_HEAD_BYTES:
                raise WrongAnswer("its head does not end")
            return None
        first, *lines = bytes(self._data[:end]).split(b"\r\n")
        protocol, status = first.split(b" ", 2)[:2]
        if not protocol.startswith(b"HTTP/1."):
            raise WrongAnswer(repr(first[:40]))
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(b":") for x in lines)}
        self._last = headers.get(b"connection") == b"close" or protocol == b"HTTP/1.0"
        if headers.get(b"transfer-encoding") == b"chunked":
            content = self._chunks(end + 4)
            return None if content is None else (int(status), content)
        come = bytes(self._data[end + 4 :])
        length = int(headers.get(b"content-length", len(come)))
        if not 0 <= length <= self._most:
            raise WrongAnswer(f"{length} bytes, of which {self._most} were allowed")
        if b"content-length" not in headers:
            self._ends_with_line, self._last = (int(status), come), True
        return (int(status), come[:length]) if len(come) >= length else None

    def _chunks(self, begin: int) -> bytes | None:
        found = b""
        while (end := self._data.find(b"\r\n", begin)) >= 0:
            size = int(self._data[begin:end].split(b";")[0], 16)
            if len(found) + size > self._most:
                raise WrongAnswer(f"more than {self._most} bytes")
            begin = end + 2 + size + 2
            if len(self._data) < begin:
                return None
            if size == 0:
                return found
            found += self._data[end + 2 : end + 2 + size]
        if len(self._data) - begin > MAX_HEAD_BYTES:
            raise WrongAnswer("a chunk without a size")
        return None
