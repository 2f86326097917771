"""An engine that answers as an enemy would: what comes over the wire, and what the answers say.

    with HostileEngine() as engine:                    # answers alone, as an engine with weights of version 1
    with HostileEngine(forward=url) as engine:         # passes on to a real engine what it does not spoil
        engine.spoil("/generate", "endless extension") # a name in WIRE or CONTENT; "" = sound again

Each instance has its own thread and port, counts its requests by path, and is spoilt while it runs.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any, Self

import aiohttp

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
Send = Callable[[bytes], Awaitable[None]]


def _always(begin: bytes, more: bytes, pause_s: float = 0.0) -> Callable[[Send], Awaitable[None]]:
    """Return a fault that sends `begin`, and then `more` without end."""

    async def run(send: Send) -> None:
        await send(begin)
        while True:
            await send(more)
            await asyncio.sleep(pause_s)

    return run


def _once(*parts: bytes) -> Callable[[Send], Awaitable[None]]:
    """Return a fault that sends the parts one after another, and then nothing more."""

    async def run(send: Send) -> None:
        for part in parts:
            await send(part)
            await asyncio.sleep(0.02)
        await asyncio.Event().wait()

    return run


WIRE: dict[str, Callable[[Send], Awaitable[None]]] = {
    "negative chunk": _once(CHUNKED + b"-6\r\n"),
    "negative chunk later": _once(CHUNKED, b"-6\r\n\r\n"),
    "underscored chunk": _once(CHUNKED + b"0_2\r\n{}\r\n0\r\n\r\n"),
    "huge chunk": _once(CHUNKED + b"f" * 20 + b"\r\n{}"),
    "signed length": _once(HEAD + b"content-length: +2\r\n\r\n{}"),
    "negative length": _once(HEAD + b"content-length: -2\r\n\r\n{}"),
    "two lengths": _once(HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"),
    "endless extension": _always(CHUNKED + b"1;", b"a" * 2**16),
    "endless extensions": _always(CHUNKED, (b"1;" + b"a" * 3000 + b"\r\n \r\n") * 20),
    "tiny chunks": _always(CHUNKED, b"1\r\n \r\n" * 10_000),
    "endless headers": _always(HEAD, b"".join(b"x-%d: y\r\n" % number for number in range(4000))),
    "endless line": _always(HEAD + b"x: ", b"y" * 2**16),
    "endless status": _always(b"HTTP/1.1 200 ", b"y" * 2**16),
    "endless continue": _always(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 500),
    "endless body": _always(HEAD + b"\r\n", b" " * 2**16),
    "endless trailers": _always(CHUNKED + b"2\r\n{}\r\n0\r\n", (b"x: " + b"y" * 4000 + b"\r\n") * 20),
    "endless garbage": _always(b"", b"\x00\xff" * 2**15),
    "one byte a time": _always(HEAD + b"content-length: 100000\r\n\r\n", b" ", 0.1),
    "one byte of head a time": _always(b"HTTP/1.1 200 OK\r\nx: ", b"y", 0.1),
    "silent": _once(),
}


def sound_answer(version: str = "1", tokens: tuple[int, ...] = (5, 6, 7)) -> dict[str, Any]:
    """Return an answer of /generate as a sound engine gives it."""
    return {
        "text": "",
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "completion_tokens": len(tokens),
            "prompt_tokens": 3,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
        },
    }


def _with_tokens(answer: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    spans = answer["meta_info"]["weight_versions"] or [{"version": "1"}]
    span = {"version": spans[-1]["version"], "start": 0, "end": len(tokens)}
    pairs = [[-0.5, token, None] for token in tokens]
    meta = {"output_token_logprobs": pairs, "completion_tokens": len(tokens), "weight_versions": [span]}
    return answer | {"meta_info": answer["meta_info"] | meta}


def _tokens(answer: dict[str, Any]) -> list[int]:
    return [pair[1] for pair in answer["meta_info"]["output_token_logprobs"]]


def _named(answer: dict[str, Any], change: Callable[[int, str], str]) -> dict[str, Any]:
    """Return the answer with its versions renamed: `change` gets number and process."""
    meta = answer["meta_info"]
    for span in [*(meta["weight_versions"] or []), meta]:
        key = "version" if "version" in span else "weight_version"
        number, _, process = str(span[key]).partition("-")
        span[key] = change(int(number) if number.isdigit() else 0, process)
    return answer


def _joined(number: int, process: str) -> str:
    return f"{number}-{process}" if process else str(number)


CONTENT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "too many tokens": lambda answer: _with_tokens(answer, _tokens(answer) * 500),
    "outside the vocabulary": lambda answer: _with_tokens(answer, [2**30 for _ in _tokens(answer)]),
    "no tokens": lambda answer: _with_tokens(answer, []),
    "no spans": lambda answer: (
        answer | {"meta_info": answer["meta_info"] | {"weight_versions": None, "weight_version": None}}
    ),
    "spans that miss a token": lambda answer: (
        answer
        | {
            "meta_info": answer["meta_info"]
            | {"weight_versions": [{"version": "1", "start": 1, "end": len(_tokens(answer))}]}
        }
    ),
    "the future": lambda answer: _named(answer, lambda number, process: _joined(number + 1000, process)),
    "positive logprobs": lambda answer: json.loads(json.dumps(answer).replace("-0.", "0.")),
    "no finish": lambda answer: answer | {"meta_info": answer["meta_info"] | {"finish_reason": None}},
    "a list": lambda answer: [answer],
    "another canary": lambda answer: json.loads(
        json.dumps(answer), parse_float=lambda text: min(-1e-3, float(text)) * 1.5
    ),
}
"""Changes of a sound answer of /generate; "another canary" also of the answer that a learner compares with its own."""


class HostileEngine:
    """An engine whose answers can be spoilt, by path (see the top of this file)."""

    def __init__(self, forward: str = "", version: str = "1", port: int = 0) -> None:
        """Prepare an engine that passes requests on to `forward`, or answers itself as one that holds `version`."""
        self.version, self.counts = version, Counter[str]()
        self._forward, self._port = forward, port
        self._spoilt: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def spoil(self, path: str, fault: str) -> None:
        """Spoil the answers of a path from now on; an empty `fault` makes them sound again."""
        assert not fault or fault in WIRE or fault in CONTENT, fault
        self._spoilt[path] = fault

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as self._session:
            server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, backlog=512)
            self._port = server.sockets[0].getsockname()[1]
            started.set()
            await self._stop.wait()
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._one_request(reader, send)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _one_request(self, reader: asyncio.StreamReader, send: Send) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n"))
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.counts[path] += 1
        fault = self._spoilt.get(path, "")
        if fault in WIRE:
            await WIRE[fault](send)
        status, content = await self._answer(method, path, body, headers)
        if fault in CONTENT and status == 200:
            content = json.dumps(CONTENT[fault](deepcopy(json.loads(content)))).encode()
        line = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        await send(line.encode() + content)

    def _most_tokens(self, path: str, body: bytes) -> int:
        return int(json.loads(body)["sampling_params"]["max_new_tokens"]) if path == "/generate" else 0

    async def _answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._forward:
            assert self._session is not None
            sent = {name: value for name, value in headers.items() if name in ("authorization", "content-type")}
            async with self._session.request(method, self._forward + path, data=body, headers=sent) as answer:
                return answer.status, await answer.read()
        answers: dict[str, Any] = {
            "/generate": sound_answer(self.version, (5, 6, 7)[: self._most_tokens(path, body)]),
            "/model_info": {"model_path": "x", "weight_version": self.version},
            "/server_info": {},
        }
        return 200, json.dumps(answers.get(path, {"success": True})).encode()
