"""Whether a server still answers: one that hangs does not end, so nobody would start it again."""

from __future__ import annotations

import asyncio
import threading
import time

from shared.engine_api import EngineClient, EngineError
from shared.log import get_logger

LOG = get_logger("health")
EVERY_S = 5.0
ANSWER_S = 5.0


class HealthProbe:
    """Asks a server's /health every few seconds, in a thread of its own, until `stop`. Where it cannot ask, that is no
    answer."""

    def __init__(self, url: str, *, first_s: float, silent_s: float) -> None:
        """`first_s`: longest time until its first answer; `silent_s`: longest time between two."""
        self._url, self._limit_s, self._silent_s = url, first_s, silent_s
        self._heard = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._ask, name="health", daemon=True).start()

    @property
    def missing(self) -> str:
        """Empty while it answers in time; else in words that it does not."""
        return f"gave no answer for {self._limit_s:g} s" if time.monotonic() - self._heard > self._limit_s else ""

    def stop(self) -> None:
        self._over.set()

    def _ask(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                with asyncio.Runner() as runner:
                    heard = runner.run(self._answers())
            except Exception as error:  # noqa: BLE001 - of this process, such as no descriptor left: it may pass
                LOG.error("%s is not asked: %s: %s", self._url, type(error).__name__, error)
                continue
            if heard:
                self._heard, self._limit_s = time.monotonic(), self._silent_s

    async def _answers(self) -> bool:
        """Whatever it says: an error is an answer."""
        try:
            async with EngineClient(self._url) as client:
                await client.health(ANSWER_S)
        except EngineError as error:
            return error.status != 0
        return True
