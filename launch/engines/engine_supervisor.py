"""Supervises this host's engines: starts them, waits until they serve, restarts those that have ended or hang."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from launch.engines.health_probe import HealthProbe
from launch.engines.kinds.engine_kind import EngineSpec
from launch.engines.probe import ModelFacts, check_answers, check_engine
from launch.processes.children import Child, start, start_family
from launch.processes.restarts import Restarts, Supervised, how_it_ended
from launch.processes.run_logs import before, bound_log
from shared.config.sections import EngineConfig
from shared.engine.engine_api import EngineClient, EngineError
from shared.keys import write_secret

SILENT_S = 120.0  # an engine that does not answer for this time is restarted
LAST_BYTES = 2**16  # bytes of a log that are read for its last lines


class EngineServer(Supervised):
    """One engine of this host: its process, which is restarted if it ends or hangs."""

    def __init__(self, spec: EngineSpec, settings: EngineConfig) -> None:
        super().__init__(spec.name, Restarts(settings.max_restarts), "engine.max_restarts")
        self.spec, self._settings = spec, settings
        self.probe: HealthProbe | None = None

    def start(self) -> None:
        spec = self.spec
        if spec.log is None:
            self.child = start(spec.name, spec.command, env=spec.env)
        else:
            fresh = len(self.restarts) == 0
            if fresh:
                before(spec.log).unlink(missing_ok=True)
            if spec.secret is not None:
                write_secret(*spec.secret, anew=True)
            self.child = start_family(spec.name, spec.command, spec.log, env=spec.env, fresh=fresh)
        self.restarts.started()
        timeouts = {"first_s": self._settings.start_limit_s, "silent_s": SILENT_S}
        self.probe = HealthProbe(spec.url, **timeouts)

    def keep_alive(self) -> None:
        super().keep_alive()
        if self.spec.log is not None:
            bound_log(self.spec.log)

    def failure(self, child: Child) -> str:
        """Return how the engine has failed, in words; an engine that hangs has failed, too."""
        assert self.probe is not None
        failure = how_it_ended(child) or self.probe.missing
        if failure:
            self.probe.stop()
        return failure

    def given_up(self, failure: str, child: Child) -> EngineError:
        print(last_lines(self.spec.log), file=sys.stderr, flush=True)
        return EngineError(self.name, failure)

    def hint(self) -> str:
        return "; " + last_lines(self.spec.log, 3)


def wait_until_serving(
    urls: tuple[str, ...], engines: list[EngineServer], model: ModelFacts, timeout_s: float, api_key: str = ""
) -> None:
    """Wait until every engine has answered a request with an image; SGLang takes long for its first. Raise EngineError,
    which names the engine, if one has ended, is not ready in time, or serves another model."""

    async def wait() -> None:
        clients = [EngineClient(url, timeout_s=timeout_s, api_key=api_key) for url in urls]
        tasks = [asyncio.create_task(check_engine(client, model, timeout_s)) for client in clients]
        try:
            while waiting := [task for task in tasks if not task.done()]:
                await asyncio.wait(waiting, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                for engine in engines:
                    if how := how_it_ended(engine.child):
                        print(last_lines(engine.spec.log), file=sys.stderr, flush=True)
                        raise EngineError(engine.spec.name, f"{how} while starting; {_where(engine.spec.log)}")
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for client in clients:
                await client.close()

    asyncio.run(wait())


def _where(log: Path | None) -> str:
    return "its last lines are above" if log is None else f"its log is {log}"


def check_router(url: str, model: ModelFacts, timeout_s: float, api_key: str = "") -> None:
    """Raise EngineError for a router that does not answer, finds no engine in time, or changes requests."""

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
                    await asyncio.sleep(0.5)  # the router has not found its engines yet
        finally:
            await client.close()

    asyncio.run(check())


def last_lines(log: Path | None, count: int = 12) -> str:
    """Return the end of an engine's log, for an error message."""
    if log is None or not log.exists():
        return "its last lines are above"
    with log.open("rb") as file:  # the log of an engine that has run for weeks may be large
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f"its log {log} ends:\n" + "\n".join(f"    {line[:300]}" for line in lines[-count:])
