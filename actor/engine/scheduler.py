"""Continuous batching: one thread owns the model, requests join and leave at every step.

It takes requests and calls from other threads (`submit`, `call`) and reports results by callback. It waits only when
there is no work or while paused, at most a second at a time; any new request or call wakes it.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from actor.engine.generate_request import GenerateRequest, finished
from actor.engine.runner import Row, Runner
from actor.engine.sampling import BiasCache, sample
from actor.engine.slots import SlotTable

log = logging.getLogger("engine")
MAX_STEP_TOKENS = 8192
MAX_FAILURES = 64  # failed requests in a row, each computed alone; one more means that the model has failed


class Scheduler:
    """The scheduler of one model. `generation` counts weight updates; `weight_version` is the learner's name of the
    last one."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int,
        request_timeout_s: float,
        weight_version: str,
        on_failure: Callable[[], object],
    ) -> None:
        self.runner = runner
        self.slots = SlotTable(runner.num_slots, runner.max_context, only_whole=runner.is_recurrent)
        self.weight_version, self.generation = weight_version, 0
        self.paused = False
        self.failed: BaseException | None = None
        self.steps, self.tokens_out, self.tokens_in, self.tokens_reused = 0, 0, 0, 0
        self._max_batch, self._timeout_s, self._on_failure = max_batch, request_timeout_s, on_failure
        self._biases = BiasCache(runner.vocab_size, runner.device)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[GenerateRequest] = deque()
        self._running: dict[int, GenerateRequest] = {}  # by slot
        self._stopping = False
        self._failures = 0  # requests in a row that failed, each computed alone
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)
        self._thread.join(timeout_s)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. `request.on_done` is called on the scheduler's thread when the request has a finish
        reason."""
        self._inbox.put(lambda: self._accept(request))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` between two steps, on the thread that owns the model."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # the caller has given up
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)

        self._inbox.put(run)
        return future

    @property
    def num_open(self) -> int:
        return len(self._waiting) + len(self._running)

    # ------------------------------------------------------------------ on the scheduler's thread

    def pause(self, mode: str) -> None:
        """Pause generation: `in_place` keeps requests and their KV, `retract` recomputes them later, `abort` ends
        them."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for request in sorted(self._running.values(), key=lambda r: r.arrived_s, reverse=True):
                self.slots.release(request.slot, keep=False)
                request.slot = -1
                self._waiting.appendleft(request)
            self._running.clear()

    def resume(self) -> None:
        self.paused = False

    def abort(self, rid: str | None) -> int:
        """End the request `rid` (None: all requests) with the finish reason `abort`; return the number of ended
        requests."""
        doomed = [r for r in (*self._waiting, *self._running.values()) if rid is None or r.rid == rid]
        for request in doomed:
            self._finish(request, "abort")
        return len(doomed)

    def weights_changed(self, weight_version: str | None, flush: bool) -> None:
        """Note that the model has new weights: recompute derived tensors, and with `flush` drop the KV cache."""
        self.runner.weights_changed()
        self.generation += 1
        if weight_version is not None:
            self.weight_version = weight_version
        if flush:
            self.slots.flush()

    def _accept(self, request: GenerateRequest) -> None:
        if self.failed is not None:
            request.end(f"abort: the model thread failed: {self.failed}")
            return
        self._waiting.append(request)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._drain()
                if not self._stopping and not self.paused and self.num_open:
                    self._expire()
                    self._admit()
                    self._step()
        except Exception as error:
            log.exception("the model thread failed")
            self.failed = error
            self.abort(None)
            self._on_failure()
            while not self._stopping:  # answers every later request with the failure
                self._inbox.get()()

    def _drain(self) -> None:
        idle = self.paused or not self.num_open
        try:
            self._inbox.get(block=idle, timeout=1.0 if idle else None)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            if idle:
                self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        late = [r for r in (*self._waiting, *self._running.values()) if now - r.arrived_s > self._timeout_s]
        for request in late:
            log.warning("request %s aborted after %.0f s", request.rid, self._timeout_s)
            self._finish(request, "abort")

    def _admit(self) -> None:
        """Give waiting requests a slot, in order of arrival, within the limits of batch size, slots and tokens per
        step."""
        tokens = 0
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting[0]
            keys = request.all_keys()
            if tokens and tokens + len(keys) > MAX_STEP_TOKENS:
                break
            placement = self.slots.place(keys, self.generation)
            if placement is None:
                break
            self._waiting.popleft()
            reused = request.whole_images(placement.reused)
            if reused < placement.reused and self.slots.only_whole:
                reused = 0
            self.slots.shorten(placement.slot, reused)
            if placement.donor >= 0 and reused:
                self.runner.copy_prefix(placement.donor, placement.slot, reused)
            request.slot, request.cached = placement.slot, reused
            request.admitted_s = request.admitted_s or time.monotonic()
            self.tokens_reused += reused
            self._running[placement.slot] = request
            tokens += len(keys) - reused

    def _step(self) -> None:
        """Run one forward over all running requests, then sample one token for each."""
        batch = sorted(self._running.values(), key=lambda r: (r.num_new() > 1, r.slot))
        if not batch:
            return
        try:
            self._compute(batch)
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - one request may be the cause; computing each alone shows which
            log.error("a step of %d requests failed: %s: %s", len(batch), type(error).__name__, _line(error))
            for request in batch:
                if not request.finish_reason:
                    self._compute_alone(request)

    def _compute_alone(self, request: GenerateRequest) -> None:
        """Compute one request alone, and abort it if it fails. If many fail in a row, the model is the cause and the
        error is raised."""
        try:
            self._compute([request])
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures > MAX_FAILURES:
                raise
            self._finish(request, f"abort: {type(error).__name__}: {_line(error)}")

    def _compute(self, batch: list[GenerateRequest]) -> None:
        images = [r.new_images() for r in batch]
        distinct = [*{id(image): image for own in images for image in own}.values()]  # episodes of a group share images
        encoded = self.runner.encode([p.patches for p in distinct], [p.grid for p in distinct])
        features = {id(image): found for image, found in zip(distinct, encoded, strict=True)}
        rows = [_row(r, [features[id(p)] for p in own]) for r, own in zip(batch, images, strict=True)]
        tokens, logprobs, watched = sample(self.runner.forward(rows), [r.sampler for r in batch], self._biases)
        self.runner.keep_states()
        self.steps += 1
        self.tokens_out += len(batch)
        for request, token, logprob, seen in zip(batch, tokens, logprobs, watched, strict=True):
            num_new = request.num_new()
            self.tokens_in += num_new
            self.slots.append(request.slot, request.new_keys())
            if not math.isfinite(logprob):  # the weights or the request give no valid distribution
                self._finish(request, "abort: the logprob of the sampled token is not finite")
                continue
            request.advance(token, logprob, self.weight_version, seen)
            reason = finished(request)
            if reason:
                self._finish(request, reason)

    def _finish(self, request: GenerateRequest, reason: str) -> None:
        if request.slot >= 0:
            self.slots.release(request.slot, answered=len(request.tokens) > 1)
            self._running.pop(request.slot, None)
        elif request in self._waiting:
            self._waiting.remove(request)
        request.end(reason)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _row(request: GenerateRequest, features: list[tuple[torch.Tensor, ...]]) -> Row:
    ids, positions = request.new_tokens()
    if not features:
        return Row(request.slot, request.cached, ids, positions)
    visual = np.flatnonzero(request.new_keys() < 0)
    levels = tuple(torch.cat(level) for level in zip(*features, strict=True))
    return Row(request.slot, request.cached, ids, positions, visual, levels)
