"""One pass's conversation with the engines: pause, begin, buckets, end, continue."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from learner.weights.buckets import Bucket
from learner.weights.calls import EngineError, EngineTraits, call, each, failures, start
from learner.weights.group import LAST_WORD_S, EnginesFailed, WeightGroupManager, post
from shared.log import get_logger
from shared.types import PolicyVersion

INSTALL = "install:"  # before the version: how SGLang's server with our plugin is told to install what it received


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    call_timeout_s: float = 30.0
    pause_mode: str = "in_place"  # or retract: running requests are computed anew, their KV forgotten


class Seconds:
    """Seconds of a publication by name."""

    def __init__(self) -> None:
        self.values = dict.fromkeys(("gather", "broadcast", "load", "pause", "proof"), 0.0)

    def add(self, name: str, seconds: float) -> None:
        self.values[name] += seconds

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)


class WeightUpdate:
    """After a failure it sends no more; `end` always continues generation. `failed` holds who failed, and why.

    An engine that receives beside generation is not paused: it installs the whole update between two of its steps.
    """

    def __init__(
        self,
        manager: WeightGroupManager,
        members: Mapping[str, EngineTraits],
        version: PolicyVersion,
        settings: UpdateSettings,
        seconds: Seconds,
    ) -> None:
        self._manager, self._members, self._version = manager, members, version
        self._settings, self._seconds = settings, seconds
        self._log = get_logger("publisher")
        self.failed: dict[str, str] = {}
        self.working = True
        self._in_flight: Future[None] | None = None
        in_place = settings.pause_mode == "in_place"
        self._paused = [url for url, traits in members.items() if not (in_place and traits.beside_generation)]
        self._paused_at = 0.0

    def begin(self) -> None:
        with self._noting():
            self._manager.group_of(self._members)
            self._paused_at = time.monotonic()
            self._all("/pause_generation", {"mode": self._settings.pause_mode}, self._paused)
            self._raise(each(self._members, self._begin, 3 * self._settings.call_timeout_s + 1))

    def send(self, bucket: Bucket) -> None:
        """Starts on this bucket when the one before has arrived: the caller gathers the next meanwhile."""
        self._wait()
        if self.working:
            self._in_flight = start(self._send, bucket)

    def end(self) -> None:
        self._wait()
        if self._paused_at == 0.0:  # the group did not come about
            return
        install = {"weight_version": str(self._version), "rid": f"{INSTALL}{self._version}"}
        body: dict[str, Any] = install if self.working else {"discard": True}
        with self._noting(), self._seconds.of("load"):
            self._all("/end_weight_update", body, self._members, optional=True, quiet=not self.working)
        with self._noting():
            self._all("/continue_generation", {}, self._paused)
        if self._paused:
            self._seconds.add("pause", time.monotonic() - self._paused_at)

    # ------------------------------------------------------------------ what these are made of

    def _begin(self, url: str) -> None:
        """Opens an update; one that an earlier publication has left open is ended first."""
        limit = self._settings.call_timeout_s
        try:
            post(url, "/begin_weight_update", {}, limit)
        except EngineError as error:
            if error.status == 404:  # an older server
                return
            if error.status != 400:
                raise
            self._log.info("%s: %s; ending it", url, error.reason)
            post(url, "/end_weight_update", {"discard": True}, limit)
            post(url, "/begin_weight_update", {}, limit)

    def _send(self, bucket: Bucket) -> None:
        group = self._manager.group_of(self._members)
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": self._settings.pause_mode == "retract",
            "weight_version": str(self._version),
        }
        limit = group.timeout_s + 2 * LAST_WORD_S
        calls = {url: partial(post, url, "/update_weights_from_distributed", body, limit) for url in self._members}
        started, sent = time.monotonic(), 0.0

        def own() -> None:
            nonlocal sent
            group.broadcast(bucket.flat)
            sent = time.monotonic() - started

        self._manager.together("send weights", calls, own)
        self._seconds.add("broadcast", sent)
        self._seconds.add("load", time.monotonic() - started - sent)

    def _wait(self) -> None:
        if self._in_flight is not None:
            with self._noting():
                self._in_flight.result()  # limited by `together`
            self._in_flight = None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except EnginesFailed as error:
            self.failed |= {url: reason for url, reason in error.reasons.items() if url not in self.failed}
            self.working = False

    def _all(self, path: str, body: Any, urls: Any, *, optional: bool = False, quiet: bool = False) -> None:
        """The same call to all; each that fails is noted, the others are not held up."""
        limit = self._settings.call_timeout_s

        def one(url: str) -> None:
            try:
                call(url, path, body, limit)
            except EngineError as error:
                if not (optional and error.status == 404):
                    raise

        results = each(urls, one, limit + 1)
        if not quiet:
            self._raise(results)

    def _raise(self, results: Mapping[str, object]) -> None:
        if reasons := failures(results):
            raise EnginesFailed(reasons)
