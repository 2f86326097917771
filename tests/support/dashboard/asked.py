"""One request to a dashboard over a folder of runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from launch.dashboard_server.runs import Runs
from launch.dashboard_server.web import Server


def asked(folder: Path, path: str | URL, *, token: str = "", method: str = "GET", **options) -> tuple[int, dict, bytes]:
    """Return (status, headers, body) of one request."""

    async def ask() -> tuple[int, dict, bytes]:
        async with TestClient(TestServer(Server(Runs([folder]), "127.0.0.1", token).app)) as client:
            response = await client.request(method, path, allow_redirects=False, **options)
            return response.status, dict(response.headers), await response.read()

    return asyncio.run(ask())
