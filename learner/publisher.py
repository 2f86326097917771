"""New weights to all engines: gathered bucket by bucket, broadcast, and confirmed; a failing engine is left behind.

    rank 0                                   engine
    (group, once) init_weights_update_group ─▶ joins as rank 1, 2, ...
    pause_generation in_place ───────────────▶ requests and KV stay
    begin_weight_update ─────────────────────▶ (404: an engine that does not know it)
    per bucket: update_weights_from_distributed + broadcast
    end_weight_update, continue_generation ──▶ generates with the new version

Every rank gathers; only rank 0 talks. An HTTP error or silence on either side ends the pass: the engine at fault is
named and left out, the others get the weights in another pass, and the next publication tries it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from learner.buckets import Bucket, buckets, gathered
from learner.dist import Ranks, agree
from learner.engine_link import EngineError, WeightGroup, call, is_healthy, own_address, start
from learner.model import Policy
from shared.log import get_logger
from shared.types import PolicyVersion

_READ_BACK = "model.language_model.norm.weight"
_NUM_READ_BACK = 8
_LAST_WORD_S = 2.0  # for the answers of those that waited for another

__all__ = ["PublishSettings", "Publisher", "gathered"]


@dataclass(frozen=True, slots=True)
class PublishSettings:
    backend: str = "gloo"  # nccl when learner and engines are on GPUs
    bucket_bytes: int = 256 << 20
    timeout_s: float = 120.0  # of one bucket, and of joining
    call_timeout_s: float = 30.0  # of the other calls
    health_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one pass over all buckets did."""

    num_bytes: int
    failed: dict[str, str]  # engine -> reason


class Publisher:
    """`publish` is a collective of the learner's ranks."""

    def __init__(self, policy: Policy, ranks: Ranks, settings: PublishSettings = PublishSettings()) -> None:
        self.policy, self.ranks, self.settings = policy, ranks, settings
        self._log = get_logger("publisher")
        self._members: tuple[str, ...] = ()
        self._group: WeightGroup | None = None
        self._generation = 0

    def publish(self, version: PolicyVersion, engines: Collection[str]) -> dict[str, float]:
        """Gives the policy's weights, as `version`, to all `engines` (rank 0's; ignored elsewhere) that work.

        Returns metrics; never raises for an engine's fault, and never waits longer than the settings say.
        """
        started = time.monotonic()
        dropped: dict[str, str] = {}
        members = self._healthy(engines, dropped) if self.ranks.is_main else []
        num_bytes, paused_s = 0, 0.0
        while True:
            begun = time.monotonic()
            done = self._one_pass(version, members)
            paused_s += time.monotonic() - begun
            dropped |= done.failed
            num_bytes += done.num_bytes
            members = [url for url in members if url not in done.failed]
            if not agree(bool(done.failed) and bool(members), self.ranks):
                break
        for url, reason in dropped.items():
            self._log.warning("engine %s did not take version %d: %s", url, version, reason)
        return {
            "publish/seconds": time.monotonic() - started,
            "publish/paused_s": paused_s,
            "publish/bytes": float(num_bytes),
            "publish/engines": float(len(members)),
            "publish/dropped": float(len(dropped)),
        }

    def close(self) -> None:
        """Leaves the group; engines that are gone are no error."""
        self._leave()

    # ------------------------------------------------------------------ one pass over all buckets

    def _one_pass(self, version: PolicyVersion, members: Sequence[str]) -> _Pass:
        """Every rank walks all buckets, whatever happens to the engines."""
        link = _Link(self, version, members) if self.ranks.is_main and members else None
        if link:
            link.begin()
        num_bytes = 0
        for bucket in buckets(gathered(self.policy), self.policy.dtype, self.settings.bucket_bytes):
            if link and link.working:
                link.send(bucket)
                num_bytes += bucket.flat.numel()
        if link:
            link.end()
        return _Pass(num_bytes, link.failed if link else {})

    # ------------------------------------------------------------------ members and their group

    def _healthy(self, engines: Collection[str], dropped: dict[str, str]) -> list[str]:
        urls = sorted(engines)
        asked = [start(is_healthy, url, self.settings.health_timeout_s) for url in urls]
        errors = [future.result() for future in asked]
        dropped |= {error.url: error.reason for error in errors if error}
        return [url for url, error in zip(urls, errors, strict=True) if not error]

    def group_of(self, members: Sequence[str]) -> WeightGroup:
        """The group with exactly these engines, built anew if they have changed. EngineError names who did not join."""
        if self._group is not None and self._members == tuple(members):
            return self._group
        self._leave()
        self._generation += 1
        settings = self.settings
        group = WeightGroup(f"pronk_weights_{self._generation}", len(members) + 1, settings.backend, settings.timeout_s)
        self._members, self._group = tuple(members), group
        joins: dict[str, Callable[[], Any]] = {}
        for rank, url in enumerate(members, start=1):
            body = {
                "master_address": own_address(url),
                "master_port": group.port,
                "rank_offset": rank,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": settings.backend,
            }
            joins[url] = partial(call, url, "/init_weights_update_group", body, group.timeout_s + 2 * _LAST_WORD_S)
        with self.watched("join the group"):
            self.together(joins, group.connect, group)
        return group

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """A group in which something failed is not used again."""
        try:
            yield
        except _Failures as failures:
            self._log.warning("could not %s: %s", what, failures)
            self._leave()
            raise

    def _leave(self) -> None:
        group, members = self._group, self._members
        self._group, self._members = None, ()
        if group is None:
            return
        group.abort()
        body = {"group_name": group.name}
        leaving = [start(call, url, "/destroy_weights_update_group", body, 5.0) for url in members]
        wait(leaving, timeout=6.0)
        for future in leaving:
            if future.done() and (error := future.exception()) is not None:
                self._log.debug("leaving the group: %s", error)

    def together(self, calls: Mapping[str, Callable[[], Any]], own: Callable[[], None], group: WeightGroup) -> None:
        """Runs each engine's call and rank 0's own part at once; _Failures, naming who is at fault, if any fails.

        An engine that answers with an error is at fault. When time runs out instead, here or there, all have waited
        for the one that is silent: the group is broken up, which makes the innocent answer.
        """
        futures: dict[Future[Any], str] = {start(function): url for url, function in calls.items()}
        futures[start(own)] = ""
        started = time.monotonic()
        deadline = started + group.timeout_s + 1.0
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
            errors = {futures[f]: error for f in done if (error := f.exception()) is not None}
            for error in errors.values():
                if not isinstance(error, EngineError | RuntimeError):
                    raise error
            refused = {url: _reason(error) for url, error in errors.items() if url}
            if refused and time.monotonic() - started < 0.8 * group.timeout_s:
                raise _Failures(refused)
            if errors or not done:
                group.abort()
                wait(pending, timeout=_LAST_WORD_S)
                silent = [url for future, url in futures.items() if url and not future.done()]
                raise _Failures(dict.fromkeys(silent or calls, f"not heard of within {group.timeout_s:g} s"))


class _Failures(Exception):
    """Engines at fault, with reasons."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{url}: {reason}" for url, reason in reasons.items()))
        self.reasons = reasons


def _reason(error: BaseException | None) -> str:
    return error.reason if isinstance(error, EngineError) else " ".join(str(error).split())[:300]


class _Link:
    """One pass's conversation with the engines. After a failure it sends no more; `end` always continues generation."""

    def __init__(self, publisher: Publisher, version: PolicyVersion, members: Sequence[str]) -> None:
        self.publisher, self.version, self.members = publisher, version, members
        self.failed: dict[str, str] = {}
        self.working = True
        self._paused = False
        self._sent_norm: tuple[str, list[float]] | None = None  # a parameter to read back: name, first values

    def begin(self) -> None:
        with self._noting():
            self.publisher.group_of(self.members)
            self._paused = True
            self._call("/pause_generation", {"mode": "in_place"})
            self._call("/begin_weight_update", {}, optional=True)

    def send(self, bucket: Bucket) -> None:
        publisher = self.publisher
        with self._noting():
            group = publisher.group_of(self.members)
            body = {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": group.name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": str(self.version),
            }
            calls = {url: partial(_send_bucket, url, body, group.timeout_s + 2 * _LAST_WORD_S) for url in self.members}
            with publisher.watched("send weights"):
                publisher.together(calls, lambda: group.broadcast(bucket.flat), group)
        self._sent_norm = self._sent_norm or bucket.first_values(_READ_BACK, _NUM_READ_BACK)

    def end(self) -> None:
        with self._noting():
            self._call("/end_weight_update", {"weight_version": str(self.version)}, optional=True)
            self._read_back()
        if self._paused:
            with self._noting():
                self._call("/continue_generation", {})

    def _read_back(self) -> None:
        """Compares a parameter as each engine holds it with what was sent; an engine that cannot tell is believed."""
        if self._sent_norm is None or self.failed:
            return
        name, expected = self._sent_norm
        wrong = {}
        for url in self.members:
            try:
                body = {"name": name, "truncate_size": _NUM_READ_BACK}
                answer = call(url, "/get_weights_by_name", body, self.publisher.settings.call_timeout_s)
            except EngineError:
                continue
            if isinstance(answer, list) and answer and [float(x) for x in answer[:_NUM_READ_BACK]] != expected:
                wrong[url] = f"holds other values of {name} than it was sent"
        if wrong:
            raise _Failures(wrong)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except _Failures as failures:
            self.failed |= {url: reason for url, reason in failures.reasons.items() if url not in self.failed}
            self.working = False

    def _call(self, path: str, body: dict[str, Any], *, optional: bool = False) -> None:
        """The same call to all members; each that fails is noted, the others are not held up."""

        def one(url: str) -> tuple[str, str] | None:
            try:
                call(url, path, body, self.publisher.settings.call_timeout_s)
            except EngineError as error:
                if not (optional and error.status == 404):
                    return url, error.reason
            return None

        errors = [error for future in [start(one, url) for url in self.members] if (error := future.result())]
        if errors and not (self.failed and path == "/end_weight_update"):
            raise _Failures(dict(errors))


def _send_bucket(url: str, body: dict[str, Any], timeout_s: float) -> None:
    """SGLang may answer 200 and say in the body that it failed."""
    answer = call(url, "/update_weights_from_distributed", body, timeout_s)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise EngineError(url, f"refused the weights: {str(answer.get('message'))[:300]}")
