"""Who is in the weight group, and what all of it does at once: join, broadcast. Whoever is at fault is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

from learner.weights.calls import EngineError, EngineTraits, WeightGroup, call, each, failures, own_address, start
from shared.log import get_logger

LAST_WORD_S = 2.0  # for the answers of those that waited for another


class EnginesFailed(Exception):
    """Engines at fault, with reasons."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{url}: {reason}" for url, reason in reasons.items()))
        self.reasons = reasons


class WeightGroupManager:
    """The process group of rank 0 and the engines; built anew whenever they change or anything in it failed."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self.backend, self.timeout_s = backend, timeout_s
        self._log = get_logger("publisher")
        self._members: tuple[str, ...] = ()
        self._group: WeightGroup | None = None
        self._generation = 0
        self._nonce = os.urandom(4).hex()  # an engine may still hold the groups of a learner that was killed

    def group_of(self, members: Mapping[str, EngineTraits]) -> WeightGroup:
        """The group with exactly these engines. Failures names who did not join."""
        if self._group is not None and self._members == tuple(members):
            return self._group
        self.shutdown()
        self._generation += 1
        size = 1 + sum(traits.num_ranks for traits in members.values())
        group = WeightGroup(f"pronk_weights_{self._nonce}_{self._generation}", size, self.backend, self.timeout_s)
        self._members, self._group = tuple(members), group
        joins: dict[str, Callable[[], Any]] = {}
        rank = 1
        for url, traits in members.items():
            body = {
                "master_address": own_address(url),
                "master_port": group.port,
                "rank_offset": rank,
                "world_size": size,
                "group_name": group.name,
                "backend": self.backend,
            }
            joins[url] = partial(post, url, "/init_weights_update_group", body, self.timeout_s + 2 * LAST_WORD_S)
            rank += traits.num_ranks
        self.together("join the group", joins, group.connect)
        return group

    def shutdown(self) -> None:
        group, members = self._group, self._members
        self._group, self._members = None, ()
        if group is None:
            return
        group.abort()
        body = {"group_name": group.name}
        left = each(members, lambda url: call(url, "/destroy_weights_update_group", body, 5.0), 6.0)
        for url, reason in failures(left).items():
            self._log.debug("%s left the group: %s", url, reason)

    def together(self, what: str, calls: Mapping[str, Callable[[], Any]], own: Callable[[], None]) -> None:
        """Runs each engine's call and rank 0's own part at once; Failures, naming who is at fault, if any fails.

        The group is not used again after that: it is broken up, which makes those answer who waited for another.
        """
        assert self._group is not None
        futures: dict[Future[Any], str] = {start(function): url for url, function in calls.items()}
        futures[start(own)] = ""
        started = time.monotonic()
        deadline = started + self.timeout_s + 1.0
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
            errors = {futures[f]: error for f in done if (error := f.exception()) is not None}
            for error in errors.values():
                if not isinstance(error, EngineError | RuntimeError):
                    raise error
            if not errors and done:
                continue
            refused = {url: error.reason for url, error in errors.items() if isinstance(error, EngineError)}
            early = time.monotonic() - started < 0.8 * self.timeout_s and "" not in errors
            self._group.abort()
            if not early:
                wait(pending, timeout=LAST_WORD_S)
            at_fault = self._unreachable({f: url for f, url in futures.items() if not early or f.done()})
            at_fault = at_fault or refused or dict.fromkeys(calls, f"failed to {what}")
            self._log.warning("could not %s: %s", what, ", ".join(at_fault))
            self.shutdown()
            raise EnginesFailed(at_fault)

    def _unreachable(self, futures: Mapping[Future[Any], str]) -> dict[str, str]:
        """Who is silent or gone, now that nobody waits for another any more."""
        found = {}
        for future, url in futures.items():
            error = future.exception() if future.done() else None
            if url and not future.done():
                found[url] = f"not heard of within {self.timeout_s:g} s"
            elif isinstance(error, EngineError) and error.status == 0:
                found[url] = error.reason
        return found


def post(url: str, path: str, body: dict[str, Any], timeout_s: float) -> Any:
    """As `call`; some servers answer 200 and say in the body that they failed."""
    answer = call(url, path, body, timeout_s)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise EngineError(url, f"{path} failed: {str(answer.get('message'))[:300]}", 400)
    return answer
