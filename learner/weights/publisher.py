"""New weights to all engines: gathered bucket by bucket, broadcast, and confirmed; a failing engine is left out.

    rank 0                                   engine
    (group, once) init_weights_update_group ─▶ joins as rank 1, 2, ... (one for each of its tensor-parallel ranks)
    pause_generation, begin_weight_update ───▶ requests and KV stay; weights of no version
    per bucket: update_weights_from_distributed + broadcast, while the next one is gathered
    end_weight_update ───────────────────────▶ weights of the new version
    continue_generation
    weights_checker, generate ───────────────▶ shows that it does (`learner.weights.verify`), during the next step

Every rank gathers; only rank 0 talks. An engine that answers with an error, or not at all, is named and left out, and
the next publication tries it again. Where that happens between the buckets the pass is over: the others, paused
meanwhile, get the weights in another one.

Where adapters are trained, the weights that they adapt are sent, merged with them, or the adapters alone, which engines
merge; engines have the other weights already.

    Publisher (the learner's thread) ─▶ WeightUpdate ─▶ WeightGroupManager, EngineClient (the thread of EngineLink)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from learner.distributed import Ranks, broadcast_flag
from learner.guards.finite import check_finite
from learner.model.policy import Policy
from learner.weights.companions import companions_of
from learner.weights.engine_watch import EngineWatch, said_by
from learner.weights.fitting import fitting
from learner.weights.gathering import gathered_buckets
from learner.weights.group import ABORT_S, LAST_WORD_S, WeightGroupManager
from learner.weights.link import EngineLink
from learner.weights.update import TRIES, Seconds, WeightUpdate
from learner.weights.verify import Proof, WeightVerifier
from shared.engine_api import EngineClient, EngineError, each, reasons
from shared.engine_messages import EngineTraits, weight_name
from shared.log import get_logger
from shared.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class PublishSettings:
    backend: str = "gloo"  # nccl when learner and engines are on GPUs
    bucket_bytes: int = 256 << 20
    timeout_s: float = 120.0  # of one bucket, and of joining
    call_timeout_s: float = 30.0  # of the other calls
    health_timeout_s: float = 10.0
    pause_mode: str = "in_place"  # or retract: running requests are computed anew, their KV forgotten
    give_up_s: float = 600.0  # without any engine that takes weights
    senders: int = 1  # ranks of rank 0's host that are in the weight group, it included

    @property
    def longest_s(self) -> float:
        """For which faulty engines may hold rank 0 while the other ranks wait in one collective. The longest is that of
        a single bucket: all tries to begin, in the last of which an engine joins late, then the bucket and the end."""
        together_s = self.timeout_s + 2 * ABORT_S + 4 * LAST_WORD_S  # to join, or to send a bucket
        begin_s = together_s + 5 * self.call_timeout_s  # pause, rename, begin; end an update that was left open, begin
        end_s = 3 * self.call_timeout_s  # end, rename, continue
        return TRIES * begin_s + together_s + end_s


class Publisher:
    """`publish` is a collective of the learner's ranks."""

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        settings: PublishSettings = PublishSettings(),
        verifier: WeightVerifier | None = None,
        api_key: str = "",
        process_id: str = "",
    ) -> None:
        """A collective where there are several senders. `process_id` tells this learner's versions from those of the
        run's earlier processes."""
        self.policy, self.ranks, self.settings, self.verifier = policy, ranks, settings, verifier
        self._link, self._process_id = EngineLink(api_key), process_id
        self._log = get_logger("publisher")
        self._companion, urls, key = companions_of(ranks, settings.senders, settings.timeout_s)
        companions = [self._link.client(url, key) for url in urls]
        self._manager = WeightGroupManager(settings.backend, settings.timeout_s, ranks.device.index or 0, companions)
        self._served_at: float | None = None  # when an engine last took weights
        self._has_served = False
        self._left_out: Future[dict[str, str]] | None = None  # by the last publication: see EngineWatch
        self._proof: Proof | None = None  # under way

    def publish(self, version: PolicyVersion, engines: Collection[str], *, wait: bool = True) -> dict[str, float]:
        """Gives the policy's weights, as `version`, to all `engines` (rank 0's; ignored elsewhere) that work.

        Returns metrics. `wait`: until the engines have shown what they hold; otherwise `proven` tells that later.
        An engine's fault is no error and costs no more time than the settings say; TimeoutError, on all ranks, when
        there were engines but none has taken weights for `give_up_s`; WrongWeights, likewise, when one holds other
        weights than it was given, also by a proof that nobody has waited for; ValueError, likewise, for weights that
        are not finite, before any engine is asked, and where all engines have another version of NCCL than the
        learner, or take no adapters alone, and none is silent, or in trouble, or has taken weights before.
        """
        proven = self.proven()
        check_finite(self.policy.vlm.named_parameters(), self.ranks, self.policy.dtype)
        started, name = time.monotonic(), weight_name(version, self._process_id)
        members, silent, refused = self._healthy(engines) if self.ranks.is_main else ({}, {}, {})
        alone = self.policy.adapters is not None and self.policy.adapters.alone
        hopeful = bool(silent) or self._has_served or any(error.may_pass for error in refused.values())
        backend = self.settings.backend
        members, unfit = fitting(members, backend, self.ranks, adapters=alone, hopeful=hopeful)
        dropped = silent | reasons(refused) | unfit
        num_bytes, seconds, paused = 0, Seconds(), dict[EngineClient, float]()
        verifier = self.verifier if self.verifier and self.verifier.due() else None
        while True:
            modes = self.settings.pause_mode, self.settings.call_timeout_s
            update = WeightUpdate(self._manager, members, name, seconds, *modes, paused)
            self._walk(update if members else None, seconds, verifier)
            dropped |= update.failed
            num_bytes += update.num_bytes
            members = {engine: traits for engine, traits in members.items() if engine.url not in update.failed}
            if not broadcast_flag(not update.working and bool(members), self.ranks):
                break
        for url, reason in dropped.items():
            self._log.warning("engine %s did not take version %s: %s", url, name, reason)
        self._left_out = self._link.start(said_by(self._link, dropped.keys() - silent.keys()))
        self._check_somebody_is_served(bool(members), dropped)
        if verifier and broadcast_flag(bool(members), self.ranks):
            with seconds.of("proof"):
                verifier.keep_unsent()
                self._proof = verifier.start(name, members, self._link)
                proven = self.proven() if wait else proven
        if self.policy.adapters:
            proven["lora/norm"] = self.policy.adapters.relative_norm()
        return proven | {
            "publish/seconds": time.monotonic() - started,
            **{f"publish/{name}_s": value for name, value in seconds.items()},
            "publish/bytes": float(num_bytes),
            "publish/engines": float(len(members)),
            "publish/dropped": float(len(dropped)),
            "publish/refused_requests": float(sum(traits.num_refused for traits in members.values())),
        }

    def proven(self) -> dict[str, float]:
        """Metrics of the last publication's proof, if nobody has waited for it yet: a collective then, which waits for
        the engines' answers, each as long as the settings say. WrongWeights as in `publish`."""
        proof, self._proof = self._proof, None
        if proof is None or self.verifier is None:
            return {}
        return self.verifier.finish(proof, self._link)

    def watch(
        self,
        engines: Callable[[], Collection[str]],
        version: PolicyVersion,
        *,
        fresh: bool = True,
        until: float = math.inf,
    ) -> EngineWatch:
        """While entered, looks for engines that come back without `version`."""
        name = weight_name(version, self._process_id)
        return EngineWatch(self._link, engines, name, fresh=fresh, until=until, left_out=self._left_out)

    def close(self) -> None:
        """Leaves the group; engines that are gone are no error. Nothing is published after this, and a proof that is
        under way is given up."""
        if self._proof is not None:
            self._proof.verdict.cancel()
        if self._left_out is not None:
            self._left_out.cancel()
        if self._companion is not None:
            self._companion.close()
        self._link.run(self._manager.shutdown())
        self._link.close()

    def _walk(self, update: WeightUpdate | None, seconds: Seconds, verifier: WeightVerifier | None) -> None:
        """Every rank walks all buckets, whatever happens to the engines. The next is gathered while one is sent, and
        beside the last the learner computes what it answers itself."""
        in_flight: Future[None] | None = None
        for bucket in seconds.of_each("gather", gathered_buckets(self.policy, self.ranks, self.settings.bucket_bytes)):
            if update is None or bucket is None:
                continue
            if in_flight is None:  # no earlier: the engines generate while the first bucket is gathered
                in_flight = self._link.start(update.begin())
            self._link.wait(in_flight)
            if update.working:
                in_flight = self._link.start(update.send(bucket))
                if verifier:
                    verifier.keep(bucket)
        over = self._link.start(update.end(in_flight)) if update and in_flight else None
        if verifier:  # beside the last bucket
            with seconds.of("proof"):
                verifier.compute()
        if over:
            self._link.wait(over)

    def _healthy(
        self, engines: Collection[str]
    ) -> tuple[dict[EngineClient, EngineTraits], dict[str, str], dict[str, EngineError]]:
        """Those that can be sent weights; why others are not healthy; and what is wrong with those that are."""
        link, limit = self._link, self.settings.health_timeout_s
        asked = link.run(each(sorted(engines), lambda url: link.client(url).health(limit)))
        silent = reasons(asked)
        healthy = [url for url, answer in asked.items() if not isinstance(answer, EngineError)]
        found = link.run(each(healthy, lambda url: link.client(url).traits(limit)))
        members = {link.client(url): traits for url, traits in found.items() if isinstance(traits, EngineTraits)}
        return members, silent, {url: said for url, said in found.items() if isinstance(said, EngineError)}

    def _check_somebody_is_served(self, served: bool, dropped: dict[str, str]) -> None:
        now = time.monotonic()
        if served or self._served_at is None:
            self._served_at = now
        self._has_served |= served
        silent_s = now - self._served_at
        if broadcast_flag(bool(dropped) and not served and silent_s > self.settings.give_up_s, self.ranks):
            reasons = "; ".join(f"{url}: {reason}" for url, reason in dropped.items())
            raise TimeoutError(
                f"no engine has taken new weights for {silent_s:.0f} s (learner.wait_timeout_s = "
                f"{self.settings.give_up_s:g}): {reasons or 'see the log of rank 0'}; restart the engines, then resume"
            )
