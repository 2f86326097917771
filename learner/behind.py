"""Engines that come back while the learner waits for groups: started anew, and without the weights they should hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from learner.engine_link import EngineError, call
from shared.log import get_logger
from shared.types import PolicyVersion

PATIENCE_S = 2.0  # a wait shorter than this asks nobody
CALL_S = 3.0


class Behind:
    """While entered, asks the engines every few seconds; true once one answers that holds another version."""

    def __init__(self, engines: Callable[[], Collection[str]], version: PolicyVersion) -> None:
        self._engines, self._version = engines, version
        self._found = ""
        self._over = threading.Event()

    def __bool__(self) -> bool:
        return bool(self._found)

    def __enter__(self) -> Behind:
        threading.Thread(target=self._watch, name="behind", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._found:
            get_logger("publisher").info("engine %s is back; version %d goes out again", self._found, self._version)

    def _watch(self) -> None:
        while not self._over.wait(PATIENCE_S):
            for url in sorted(self._engines()):
                if not self._holds(url):
                    self._found = url
                    return

    def _holds(self, url: str) -> bool:
        """True also for an engine that does not answer: it cannot be helped now."""
        try:
            info = call(url, "/model_info", None, CALL_S)
        except EngineError:
            return True
        return not isinstance(info, dict) or info.get("weight_version") in (None, str(self._version))
