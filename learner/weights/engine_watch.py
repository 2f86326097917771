"""Engines that come back while the learner waits for groups: started anew, and without the weights they should hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from learner.weights.calls import EngineError, call
from shared.log import get_logger
from shared.types import PolicyVersion

PATIENCE_S = 2.0  # a wait shorter than this asks nobody
CALL_S = 3.0


class EngineWatch:
    """While entered, asks the engines every few seconds; sets `found` once one answers that holds another version.

    With `fresh` false the learner's weights have moved on since `version`: then only once no engine holds it any more,
    for nobody would play until the next publication, and without episodes there is none.
    """

    def __init__(self, engines: Callable[[], Collection[str]], version: PolicyVersion, *, fresh: bool = True) -> None:
        self._engines, self._version, self._fresh = engines, version, fresh
        self.found = threading.Event()
        self._url = ""
        self._over = threading.Event()

    def __enter__(self) -> EngineWatch:
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.found.is_set():
            get_logger("publisher").info("engine %s is back; version %d goes out again", self._url, self._version)

    def _watch(self) -> None:
        while not self._over.wait(PATIENCE_S):
            held = {url: self._held(url) for url in sorted(self._engines())}
            others = [url for url, version in held.items() if version not in (None, str(self._version))]
            if others and (self._fresh or str(self._version) not in held.values()):
                self._url = others[0]
                self.found.set()
                return

    def _held(self, url: str) -> str | None:
        """None for an engine that does not answer: it cannot be helped now."""
        try:
            info = call(url, "/model_info", None, CALL_S)
        except EngineError:
            return None
        version = info.get("weight_version") if isinstance(info, dict) else None
        return None if version is None else str(version)
