"""Keeps this host's engines alive: starts them, waits until they serve, starts again what has ended."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from actor.client import EngineClient, EngineError
from launch.engine_check import ModelFacts, check_engine
from launch.engines import EngineSpec, last_lines
from launch.processes import Child, start, start_family
from shared.log import get_logger

LOG = get_logger("engines")
HOUR_S = 3600.0
FIRST_PAUSE_S = 1.0


@dataclass(slots=True)
class Engine:
    """One engine through all its restarts. `child` is None while it waits for the next one."""

    spec: EngineSpec
    child: Child | None = None
    restart_at: float = 0.0
    restarts: deque[float] = field(default_factory=deque)  # when, within the last hour

    def start(self) -> None:
        spec = self.spec
        if spec.log is None:
            self.child = start(spec.name, spec.command, env=spec.env)
        else:
            self.child = start_family(spec.name, spec.command, spec.log, env=spec.env, fresh=not self.restarts)

    def how_it_ended(self) -> str:
        """Empty while it runs."""
        code = None if self.child is None else self.child.process.poll()
        if code is None:
            return ""
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def keep_alive(self, max_restarts: int) -> None:
        """Starts an engine again that has ended, after a pause that doubles each time. EngineError when it has ended
        more than `max_restarts` times within an hour."""
        now = time.monotonic()
        if self.child is None:
            if now >= self.restart_at:
                self.start()
            return
        if not (how := self.how_it_ended()):
            return
        self.child.kill()  # what it left behind
        while self.restarts and self.restarts[0] < now - HOUR_S:
            self.restarts.popleft()
        if len(self.restarts) >= max_restarts:
            print(last_lines(self.spec.log), file=sys.stderr, flush=True)
            raise EngineError(
                f"{self.spec.name} {how}, after {len(self.restarts)} restarts within an hour (engine.max_restarts)"
            )
        pause_s = FIRST_PAUSE_S * 2 ** len(self.restarts)
        self.restarts.append(now)
        self.child, self.restart_at = None, now + pause_s
        LOG.warning("%s %s; starting it again in %g s; %s", self.spec.name, how, pause_s, last_lines(self.spec.log, 3))


def wait_until_serving(urls: tuple[str, ...], engines: list[Engine], model: ModelFacts, timeout_s: float) -> None:
    """Returns when every engine has answered a request with a picture; the first takes SGLang long. EngineError names
    the engine that has ended, is not ready in time, or serves another model."""

    async def wait() -> None:
        clients = [EngineClient(url, timeout_s=timeout_s) for url in urls]
        tasks = [asyncio.create_task(check_engine(client, model, timeout_s)) for client in clients]
        try:
            while waiting := [task for task in tasks if not task.done()]:
                await asyncio.wait(waiting, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                for engine in engines:
                    if how := engine.how_it_ended():
                        print(last_lines(engine.spec.log), file=sys.stderr, flush=True)
                        raise EngineError(f"{engine.spec.name} {how} while starting; its last lines are above")
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for client in clients:
                client.close()

    asyncio.run(wait())
