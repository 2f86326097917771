"""Notices when a server stops answering: a server that hangs does not end, so that nothing else would restart it."""

from __future__ import annotations

import asyncio
import threading
import time

from shared.engine.engine_api import EngineClient, EngineError
from shared.log import get_logger

LOG = get_logger("health")
EVERY_S = 5.0
ANSWER_S = 5.0


class HealthProbe:
    """Requests a server's /health every few seconds, in its own thread, until `stop`. A request that this process
    cannot make counts as no answer."""

    def __init__(self, url: str, *, first_s: float, silent_s: float) -> None:
        """Start probing. `first_s` is the time limit until the first answer, `silent_s` that between two answers."""
        self._url, self._limit_s, self._silent_s = url, first_s, silent_s
        self._heard = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._ask, name="health", daemon=True).start()

    @property
    def missing(self) -> str:
        """ "" while the server answers in time; else a message that it does not."""
        return f"gave no answer for {self._limit_s:g} s" if time.monotonic() - self._heard > self._limit_s else ""

    def stop(self) -> None:
        self._over.set()

    def _ask(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                with asyncio.Runner() as runner:
                    answered = runner.run(self._answers())
            except Exception as error:  # noqa: BLE001 - an error of this process, such as no free descriptor, may pass
                LOG.error("%s is not asked: %s: %s", self._url, type(error).__name__, error)
                continue
            if answered:
                self._heard, self._limit_s = time.monotonic(), self._silent_s

    async def _answers(self) -> bool:
        """Tell whether the server answers at all: an error status is an answer, too."""
        try:
            async with EngineClient(self._url) as client:
                await client.health(ANSWER_S)
        except EngineError as error:
            return error.status != 0
        return True
