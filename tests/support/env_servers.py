"""Servers of environments, in this process and in their own, and one that answers what a test says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from envs.env_loops import EnvLoop
from envs.env_server import EnvServer, ServeLimits
from envs.loader import load_env, load_module

COUNTING = '''
"""Counts: each answer is a number that is added; the episode ends at ten. `done` notes what was done, and when."""
import time

from PIL import Image
from pydantic import BaseModel

SYSTEM_PROMPT = "Count to ten."


class SETTINGS(BaseModel):
    shade: int = 0
    nap_s: float = 0.0


done = []

def build_env(sample=None, args=None, **_):
    return Counting(sample, args or {})

class Counting:
    def __init__(self, sample, args):
        self.sample, self.args, self.total = sample, args, 0
        done.append("build")
    def reset(self):
        self.total = self.sample.metadata["seed"] % 3 if self.sample else 0
        return self.look(), {"metrics": {"success": 0.0}}
    def look(self):
        image = Image.new("RGB", (8, 8), (self.args.get("shade", 0), self.total, 0))
        return {"obs_str": f"It is {self.total}.", "multi_modal_data": {"image": [image]}}
    def step(self, text):
        done.append(text)
        time.sleep(self.args.get("nap_s", 0.0))
        self.total += int(text) if text.isdecimal() else {"boom": lambda: 1 / 0}.get(text, int)()
        over = self.total >= 10
        metrics = {"success": float(over)}
        return self.look(), over, {"reward": float(over), "metrics": metrics, "place": {1: object}, "args": self.args}
    def close(self):
        done.append("close")
'''


@contextmanager
def served_here(path: str, api_key: str = "", args: dict[str, Any] | None = None, **limits: Any) -> Iterator[str]:
    """Serve an environment in a thread of this process; yield the address."""
    server = EnvServer(load_module(path), load_env(path), args or {}, ServeLimits(**limits), api_key)
    with application_here(server.application(), server) as url:
        yield url


@contextmanager
def application_here(app: web.Application, server: EnvServer | None = None) -> Iterator[str]:
    """Serve an application in a thread of this process; yield the address."""
    loop = EnvLoop()
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    idle: list[Any] = []

    async def begin() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        if server is not None:
            idle.append(asyncio.create_task(server.close_idle()))
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def end() -> None:
        for task in idle:
            task.cancel()
        await runner.cleanup()
        if server is not None:
            await server.close(10.0)

    url = loop.run(begin())
    try:
        yield url
    finally:
        loop.run(end())
        loop.close()


def served_apart(path: str | Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `python -m envs.serve`; return the process and the address that it prints."""
    command = [sys.executable, "-m", "envs.serve", str(path), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()  # ends with the process
    found = re.search(r"http://\S+:\d+", line)
    assert found, line + process.stderr.read()
    return process, found[0].rstrip(",")
