"""A class of hostile input: a thread that sends one kind after another until it is stopped, and counts."""

from __future__ import annotations

import http.client
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

Kind = Callable[[random.Random], str | None]
"""Sends one input; returns the reason for which it was refused, where the sender learns it."""


class Attack(threading.Thread):
    """Draws one of `kinds` about every `every_s` seconds. A target that hangs up is no failure; any other exception is
    a fault of the test or of the product code that runs in this thread, and is kept in `defects`."""

    def __init__(self, name: str, kinds: Sequence[Kind], every_s: float, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.sent, self.refused, self.defects = 0, Counter[str](), Counter[str]()
        self._kinds, self._every_s, self._random = kinds, every_s, random.Random(f"{seed}/{name}")
        self._stop_it = threading.Event()

    def run(self) -> None:
        while not self._stop_it.wait(self._every_s * self._random.uniform(0.2, 1.8)):
            kind = self._random.choice(self._kinds)
            try:
                reason = kind(self._random)
            except (OSError, zmq.ZMQError, http.client.HTTPException) as error:
                reason = f"connection: {type(error).__name__}"
            except Exception as error:  # noqa: BLE001 - told at the end of the run
                told, reason = f"{self.name}: {type(error).__name__}: {error}"[:300], None
                if told not in self.defects:
                    traceback.print_exc()
                self.defects[told] += 1
            self.sent += 1
            if reason:
                self.refused[reason] += 1

    def stop(self) -> None:
        self._stop_it.set()
        if self.is_alive():
            self.join(60.0)
