"""Keeps this host's engines alive: starts them, waits until they serve, starts again what has ended."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass

from launch.engines.commands import EngineSpec, last_lines
from launch.engines.health import HealthProbe
from launch.engines.probe import ModelFacts, check_answers, check_engine
from launch.processes.children import Child, start, start_family
from launch.processes.restarts import Restarts, TooManyRestarts, how_it_ended
from shared.engine_api import EngineClient, EngineError
from shared.keys import write_secret
from shared.log import get_logger

LOG = get_logger("engines")


@dataclass(slots=True)
class Engine:
    """One engine through all its restarts. `child` is None while it waits for the next one."""

    spec: EngineSpec
    restarts: Restarts
    start_timeout_s: float
    silent_timeout_s: float
    child: Child | None = None
    restart_at: float = 0.0
    probe: HealthProbe | None = None

    def start(self) -> None:
        spec = self.spec
        if spec.log is None:
            self.child = start(spec.name, spec.command, env=spec.env)
        else:
            fresh = len(self.restarts) == 0
            if spec.secret is not None:
                write_secret(*spec.secret, anew=True)
            self.child = start_family(spec.name, spec.command, spec.log, env=spec.env, fresh=fresh)
        self.restarts.started()
        self.probe = HealthProbe(spec.url, first_s=self.start_timeout_s, silent_s=self.silent_timeout_s)

    def how_it_ended(self) -> str:
        """Empty while it runs."""
        return how_it_ended(self.child)

    def keep_alive(self) -> None:
        """Starts an engine again that has ended or hangs, as `Restarts` says. EngineError when it did so too often."""
        if self.child is None:
            if time.monotonic() >= self.restart_at:
                self.start()
            return
        assert self.probe is not None
        if not (how := self.how_it_ended() or self.probe.missing):
            return
        self.probe.stop()
        self.child.kill()  # itself if it hangs, and what it left behind
        try:
            pause_s = self.restarts.pause_s()
        except TooManyRestarts as error:
            print(last_lines(self.spec.log), file=sys.stderr, flush=True)
            raise EngineError(self.spec.name, f"{how}, {error} (engine.max_restarts)") from None
        self.child, self.restart_at = None, time.monotonic() + pause_s
        LOG.warning("%s %s; starting it again in %g s; %s", self.spec.name, how, pause_s, last_lines(self.spec.log, 3))


def wait_until_serving(
    urls: tuple[str, ...], engines: list[Engine], model: ModelFacts, timeout_s: float, api_key: str = ""
) -> None:
    """Returns when every engine has answered a request with an image; the first takes SGLang long. EngineError names
    the engine that has ended, is not ready in time, or serves another model."""

    async def wait() -> None:
        clients = [EngineClient(url, timeout_s=timeout_s, api_key=api_key) for url in urls]
        tasks = [asyncio.create_task(check_engine(client, model, timeout_s)) for client in clients]
        try:
            while waiting := [task for task in tasks if not task.done()]:
                await asyncio.wait(waiting, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                for engine in engines:
                    if how := engine.how_it_ended():
                        print(last_lines(engine.spec.log), file=sys.stderr, flush=True)
                        raise EngineError(engine.spec.name, f"{how} while starting; its last lines are above")
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for client in clients:
                await client.close()

    asyncio.run(wait())


def check_router(url: str, model: ModelFacts, timeout_s: float, api_key: str = "") -> None:
    """EngineError for a router that is silent, knows no engine in time, or does not pass requests on as they are."""

    async def check() -> None:
        client = EngineClient(url, timeout_s=timeout_s, api_key=api_key)
        deadline = time.monotonic() + timeout_s
        try:
            await client.wait_healthy(timeout_s)
            while True:
                try:
                    return await check_answers(client, model, timeout_s)
                except EngineError as error:
                    if error.status != 503 or time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(0.5)  # it has not found its engines yet
        finally:
            await client.close()

    asyncio.run(check())
