"""The server: static pages, JSON of `api`, images. All reading happens in one thread; nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from launch.dashboard_server.api import answer
from launch.dashboard_server.recorded import image_file
from launch.dashboard_server.runs import Runs, Unknown
from launch.dashboard_server.security import guard
from shared.recordings.reader import RecordingError
from shared.redaction import redact_text
from shared.util.http_connections import ConnectionLimit
from shared.util.user_errors import describe

PAGES = Path(__file__).resolve().parents[1] / "dashboard_pages"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
COMPRESS_BYTES = 4096
MAX_CONNECTIONS, RESERVED_CONNECTIONS = 512, 128  # in all; of them for those who have sent an authorised request
Result = TypeVar("Result")


def page_files() -> dict[str, Path]:
    """Return the pages' files by path; no other files are served."""
    return {str(path.relative_to(PAGES)): path for path in sorted(PAGES.rglob("*")) if path.suffix in TYPES}


class Server:
    def __init__(self, runs: Runs, host: str, token: str) -> None:
        self._runs, self._files = runs, page_files()
        self._reader = ThreadPoolExecutor(1, "reader")
        self.connections = ConnectionLimit(MAX_CONNECTIONS, RESERVED_CONNECTIONS)
        self.app = web.Application(middlewares=[guard(host, token, self.connections)])
        self.app.router.add_get("/", self._page)
        self.app.router.add_get("/pages/{name:.+}", self._page)
        self.app.router.add_get("/api/runs/{run}/images/{name}", self._image)
        self.app.router.add_get("/api/{path:.+}", self._api)
        self.app.on_cleanup.append(self._close)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        path = self._files.get(request.match_info.get("name", "index.html"))
        if path is None:
            raise web.HTTPNotFound
        body = await self._read(path.read_bytes)
        response = web.Response(body=body, content_type=TYPES[path.suffix], charset="utf-8")
        response.headers["Cache-Control"] = "no-cache"
        response.enable_compression()
        return response

    async def _api(self, request: web.Request) -> web.StreamResponse:
        status, value = 200, None
        path, query = request.match_info["path"], dict(request.query)
        try:
            body = await self._read(lambda: msgspec.json.encode(answer(self._runs, path, query)))
        except (Unknown, RecordingError, OSError) as error:
            status = 404 if isinstance(error, Unknown) else 422
            value = {"error": redact_text(" ".join(str(error).split()))}
            body = msgspec.json.encode(value)
        except Exception as error:  # noqa: BLE001 - whatever stands in a file costs its page alone
            status, value = 422, {"error": f"{path} cannot be shown: {describe(error)}"}
            body = msgspec.json.encode(value)
        response = web.Response(body=body, status=status, content_type="application/json")
        response.headers["Cache-Control"] = "no-store"
        if len(body) > COMPRESS_BYTES:
            response.enable_compression()
        return response

    async def _image(self, request: web.Request) -> web.StreamResponse:
        try:
            run, name = request.match_info["run"], request.match_info["name"]
            data, kind = await self._read(lambda: image_file(self._runs.get(run), name))
        except (Unknown, RecordingError, OSError) as error:
            return web.Response(status=404, text=" ".join(str(error).split()) + "\n")
        return web.Response(body=data, content_type=kind, headers={"Cache-Control": "private, max-age=86400"})

    async def _read(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    async def _close(self, _: web.Application) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
