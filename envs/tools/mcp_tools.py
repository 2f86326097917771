"""The tools of a server that speaks the Model Context Protocol (MCP).

    def tools(args):
        return mcp_tools(["python", "my_server.py"])

A process has one connection to a server, and all its episodes share it: what the server remembers, it remembers for all
of them. A server that is gone is started anew at the next call; the episodes that were calling it end as env_error.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import concurrent.futures
import os
import threading
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from envs.tools.tool import FAILED, MAX_RESULT_PIXELS, Tool, ToolContext, ToolFault, ToolResult, from_json, result_of
from shared.redaction import redact_text
from shared.rgb_images import open_image, to_rgb
from shared.util.threads import start_thread
from shared.util.user_errors import text_of

START_LIMIT_S = 60.0
CLOSE_LIMIT_S = 5.0
MAX_TOOLS = 128
MAX_IMAGE_BYTES = 32 << 20
INSTALL = "pip install --constraint constraints.txt --group mcp"
_servers: dict[tuple[int, tuple[str, ...]], McpServer] = {}
_lock = threading.Lock()


def mcp_tools(
    server: Sequence[str] | str, only: Collection[str] = (), timeout_s: float = 30.0, env: dict[str, str] | None = None
) -> tuple[Tool, ...]:
    """Return the tools of a server: `server` is the command that starts it, or the URL of one that runs. `only`: the
    names of those to offer; all, if empty. `timeout_s`: seconds for a call, at most. `env`: variables of the command,
    beside PATH and HOME. Raise ValueError if the server does not start, or lacks one of `only`."""
    key = (server,) if isinstance(server, str) else tuple(server)
    if not key or not all(key):
        raise ValueError(f"an MCP server is {server!r}, neither a command nor a URL")
    try:
        listed = _connected(key, env).tools
    except ToolFault as error:
        raise ValueError(str(error)) from error
    names = [tool.name for tool in listed]
    if missing := [name for name in only if name not in names]:
        raise ValueError(f"{_shown(key)} has no tool {missing[0]!r}; it has: {', '.join(names) or 'none'}")
    return tuple(_tool_of(key, env, tool, timeout_s) for tool in listed if not only or tool.name in only)


def _tool_of(key: tuple[str, ...], env: dict[str, str] | None, listed: Any, timeout_s: float) -> Tool:
    properties = listed.input_schema.get("properties") or {}
    description = " ".join((listed.description or listed.name).split())
    run = partial(_call, key, env, listed.name, properties, timeout_s)
    return Tool(listed.name, description, listed.input_schema, run)


def _call(
    key: tuple[str, ...],
    env: dict[str, str] | None,
    name: str,
    properties: dict[str, Any],
    timeout_s: float,
    arguments: dict[str, Any],
    context: ToolContext,
) -> ToolResult:
    read = {  # a text in a call that is written in XML may stand for a value of another type
        key: value if properties.get(key, {}).get("type", "string") == "string" else from_json(value)
        for key, value in arguments.items()
    }
    server = _connected(key, env)
    try:
        answer = server.call(name, read, timeout_s)
    except ToolFault:
        with _lock:
            if _servers.get((os.getpid(), key)) is server:
                del _servers[os.getpid(), key]
        raise
    parts = [_part(part) for part in answer.content]
    result = result_of(parts or answer.structured_content)
    return ToolResult(f"Error: {result.text}", result.images, FAILED) if answer.is_error else result


def _part(part: Any) -> Any:
    """Return a part of an answer as a text or an image."""
    if part.type == "text":
        return part.text
    if part.type != "image":
        return f"(a part of type {part.type}, which cannot be shown)"
    if len(part.data) > MAX_IMAGE_BYTES:
        raise ValueError(f"an image has over {MAX_IMAGE_BYTES} bytes")
    image = open_image(base64.b64decode(part.data))
    if image.width * image.height > MAX_RESULT_PIXELS:
        raise ValueError(f"an image has {image.width}x{image.height} pixels")
    return to_rgb(image)


def _connected(key: tuple[str, ...], env: dict[str, str] | None) -> McpServer:
    """Return this process's connection to a server, begun if there is none; a fork has its own. Raise ToolFault if the
    server does not start."""
    with _lock:
        server = _servers.get((os.getpid(), key))
        if server is None:
            server = _servers[os.getpid(), key] = McpServer(key, env)
            atexit.register(server.close)
    server.wait()
    return server


class McpServer:
    """A connection to a server, on an event loop of its own thread."""

    def __init__(self, key: tuple[str, ...], env: dict[str, str] | None) -> None:
        self._key, self._env = key, env
        self._loop = asyncio.new_event_loop()
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closing = asyncio.Event()
        self._ended = threading.Event()
        self._client: Any = None
        self.tools: list[Any] = []
        start_thread(self._run)

    def wait(self) -> None:
        """Wait until the server is there. Raise ToolFault if it does not start."""
        try:
            self._ready.result(START_LIMIT_S)
        except Exception as error:
            with _lock:
                if _servers.get((os.getpid(), self._key)) is self:
                    del _servers[os.getpid(), self._key]
            late = isinstance(error, TimeoutError)
            why = f"no answer within {START_LIMIT_S:g} s" if late else text_of(error) or type(error).__name__
            raise ToolFault(f"{_shown(self._key)} does not start: {why}") from error

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Return the server's answer. Raise TimeoutError after `timeout_s`, ToolFault if the server is gone, and
        ValueError for an error that it reports."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._ended.is_set():
            raise ToolFault(f"{_shown(self._key)} is gone")
        work: Coroutine[Any, Any, Any] = self._client.call_tool(name, arguments)
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(timeout_s)
        except TimeoutError:
            running.cancel()
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ToolFault(f"{_shown(self._key)} is gone") from error
            raise ValueError(error.message) from error
        except Exception as error:
            raise ToolFault(f"{_shown(self._key)} is gone: {text_of(error)}") from error

    def close(self) -> None:
        """End the connection, and the server if it was started here."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
            self._ended.wait(CLOSE_LIMIT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001 - told to who waits
            if not self._ready.done():
                self._ready.set_exception(error if isinstance(error, Exception) else RuntimeError(text_of(error)))
        finally:
            self._ended.set()

    async def _serve(self) -> None:
        try:
            from mcp import Client
            from mcp.client.stdio import StdioServerParameters
        except ImportError:
            raise RuntimeError(f"the package mcp is not installed: {INSTALL}") from None
        is_url = len(self._key) == 1 and self._key[0].startswith(("http://", "https://"))
        command = StdioServerParameters(command=self._key[0], args=list(self._key[1:]), env=self._env)
        async with Client(self._key[0] if is_url else command) as client:
            self._client, cursor = client, None
            while len(self.tools) < MAX_TOOLS:
                page = await client.list_tools(cursor=cursor)
                self.tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
            self._ready.set_result(None)
            await self._closing.wait()


def _shown(key: tuple[str, ...]) -> str:
    return f"the MCP server {redact_text(' '.join(key))[:200]!r}"
