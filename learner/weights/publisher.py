"""Publication of new weights to all engines: gathered bucket by bucket, broadcast, verified.

    rank 0                                   engine
    (group, once) init_weights_update_group ─▶ joins as rank 1, 2, ... (one for each of its tensor-parallel ranks)
    pause_generation, begin_weight_update ───▶ requests and KV cache stay; the weights have no version
    per bucket: update_weights_from_distributed + broadcast, while the next one is gathered
    end_weight_update ───────────────────────▶ weights of the new version
    continue_generation
    weights_checker, generate ───────────────▶ shows what it holds (`learner.weights.verify`), during the next step

Every rank gathers; only rank 0 speaks with engines. An engine that answers with an error, or not at all, is named and
left out, and the next publication tries it again. If it fails between the first and the last bucket, the pass ends: the
other engines stay paused and get the weights in another pass.

If adapters are trained, either the adapted weights are sent with the adapters merged into them, or only the adapters,
which the engines then merge. Engines have the other weights already.

    Publisher (the learner's thread) ─▶ WeightUpdate ─▶ WeightGroupManager, EngineClient (the thread of EngineLink)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from learner.distributed import Ranks, broadcast_flag
from learner.model.finite import check_finite
from learner.model.policy import Policy
from learner.weights.compatible_engines import select_compatible
from learner.weights.engine_claims import EngineClaims, RunIdentity
from learner.weights.engine_link import EngineLink
from learner.weights.engine_roster import WELL_PROBES
from learner.weights.engine_watch import EngineWatch, reported_weights
from learner.weights.gathering import gathered_buckets
from learner.weights.verify import PendingVerification, VerificationResult, WeightVerifier
from learner.weights.weight_group import ABORT_S, LAST_WORD_S, Members, WeightGroupManager
from learner.weights.weight_update import TRIES, PhaseSeconds, WeightUpdate
from shared.config.learner_section import PublishConfig
from shared.engine.engine_api import EngineClient, EngineError, each, reasons
from shared.engine.engine_messages import UNTRAINED, ServerInfo, weight_name
from shared.log import get_logger
from shared.spans import span
from shared.types import PolicyVersion

BUCKET_BYTES = 512 << 20  # gathered and broadcast at once
CALL_S = 30.0
HEALTH_S = 10.0
NAMED = 4  # engines that a publication names in lines of their own
SUMMARY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """The recipe's section `learner.publish`, and settings that follow from the rest of the recipe. Times are limits in
    seconds."""

    config: PublishConfig
    backend: str  # nccl if learner and engines are on GPUs, else gloo
    give_up_s: float  # the run ends after this time without any engine that takes weights
    bucket_bytes: int = BUCKET_BYTES
    call_timeout_s: float = CALL_S
    health_timeout_s: float = HEALTH_S

    @property
    def timeout_s(self) -> float:
        """Time limit of one bucket, and of joining the group."""
        return self.config.timeout_s

    @property
    def longest_s(self) -> float:
        """Longest time for which faulty engines can block rank 0 while the other ranks wait in one collective.

        The longest wait is that for a single bucket: all tries to begin, in the last of which an engine joins late,
        then the bucket and the end.
        """
        together_s = self.timeout_s + 2 * ABORT_S + 4 * LAST_WORD_S  # joining, or sending a bucket
        # pause, rename, begin; then end an update that was left open and begin again
        begin_s = together_s + 5 * self.call_timeout_s
        end_s = 3 * self.call_timeout_s  # end, rename, continue
        return TRIES * begin_s + together_s + end_s


class Publisher:
    """Sends the policy's weights to the engines and verifies them. `publish` is a collective of the learner's ranks."""

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        settings: PublishSettings,
        verifier: WeightVerifier | None = None,
        api_key: str = "",
        process_id: str = "",
        refuse: Callable[[str, PolicyVersion, PolicyVersion], None] = lambda *_: None,
        identity: RunIdentity | None = None,
    ) -> None:
        """Start the engines' thread. `process_id` distinguishes this learner's versions from those of earlier processes
        of the run. `refuse`(URL, first, last) is called on rank 0 for an engine with wrong weights, with the versions
        that it has sampled with since it last showed the right ones. `identity`: the run for which engines are claimed;
        None = they are not."""
        self.policy = policy
        self.ranks = ranks
        self.settings = settings
        self.verifier = verifier
        self._link = EngineLink(api_key)
        self._process_id = process_id
        self._log = get_logger("publisher")
        self._manager = WeightGroupManager(settings.backend, settings.timeout_s, ranks.device.index or 0)
        self._served_at: float | None = None  # when an engine last took weights
        self._has_served = False
        self._summarised_at = -math.inf  # when engines were last counted in a line instead of named
        self._left_out: Future[dict[str, str]] | None = None  # by the last publication: see EngineWatch
        self._pending: PendingVerification | None = None
        self._refuse = refuse
        self._claims = EngineClaims(identity) if identity is not None else None
        self._proven: dict[str, PolicyVersion] = {}  # the version at which each engine last showed the right weights
        self.distrusted: dict[str, str] = {}  # URL -> what was wrong, of engines that have to show the right weights
        self._someone_is_distrusted = False  # the same on all ranks

    def publish(self, version: PolicyVersion, engines: Collection[str], *, wait: bool = True) -> dict[str, float]:
        """Send the policy's weights, as `version`, to all healthy `engines` (rank 0's; ignored on other ranks). Return
        metrics.

        `wait`: return only after the engines have been verified; otherwise `verification_metrics` returns those metrics
        later.

        An engine's fault raises no error and costs at most the time that the settings allow. All ranks raise:

        TimeoutError if there were engines but none has taken weights for `give_up_s`.

        WrongWeights if engines hold other weights than they were sent and none has ever held the right ones, also by an
        earlier verification that nobody has waited for. Otherwise such an engine is distrusted: it gets the weights
        without their name, so that nothing that it samples counts, until it shows the right ones.

        ValueError if weights are not finite, before any engine is asked. Also if all engines have another NCCL version
        than the learner or cannot take adapters alone, unless one is silent, has a passing error, or has taken weights
        before.
        """
        metrics = self.verification_metrics()
        check_finite(self.policy.vlm.named_parameters(), self.ranks, self.policy.dtype)
        started, name = time.monotonic(), weight_name(version, self._process_id)
        members, silent, errors = self._find_healthy(engines) if self.ranks.is_main else ({}, {}, {})
        members, incompatible = select_compatible(
            members,
            self.settings.backend,
            self.ranks,
            adapters=self.policy.adapters is not None and self.policy.adapters.alone,
            others_may_join=bool(silent) or self._has_served or any(error.may_pass for error in errors.values()),
        )
        dropped = silent | reasons(errors) | incompatible
        seconds = PhaseSeconds()
        is_due = self.verifier is not None and self.verifier.is_due()
        verifier = self.verifier if is_due or self._someone_is_distrusted else None
        members, failed, num_bytes = self._send(members, name, seconds, verifier)
        dropped |= failed
        self._record_outcome(members, dropped, silent, name)
        for engine in members:
            self._proven.setdefault(engine.url, version)
        dropped |= {url: reason for url, reason in self.distrusted.items() if self._link.client(url) in members}
        trusted = [engine for engine in members if engine.url not in self.distrusted]
        self._left_out = self._link.start(reported_weights(self._link, dropped.keys() - silent.keys()))
        self._check_some_engine_is_served(bool(trusted), dropped)
        if verifier and broadcast_flag(bool(members), self.ranks):
            with seconds.measure("proof"):
                verifier.record_frozen()
                self._pending = verifier.start(name, members, self._link, frozenset(self.distrusted))
                metrics = self.verification_metrics() if wait else metrics
        if self.policy.adapters:
            metrics["lora/norm"] = self.policy.adapters.relative_norm()
        return metrics | {
            "publish/seconds": time.monotonic() - started,
            **{f"publish/{phase}_s": value for phase, value in seconds.items()},
            "publish/bytes": float(num_bytes),
            "publish/engines": float(len(trusted)),
            "publish/dropped": float(len(dropped)),
            "publish/refused_requests": float(sum(info.num_refused for info in members.values())),
        }

    def verification_metrics(self) -> dict[str, float]:
        """Return the metrics of the last publication's verification if nobody has waited for it yet; otherwise an empty
        dict.

        If one is pending, this is a collective that waits for the engines' answers within their time limits. Distrust
        the engines with wrong weights, and trust again those that show the right ones. Raise WrongWeights as `publish`
        does.
        """
        pending, self._pending = self._pending, None
        if pending is None or self.verifier is None:
            return {}
        with span("verify"):
            result, metrics = self.verifier.finish(pending, self._link)
        if self.ranks.is_main:
            self._judge(result, pending)
        self._someone_is_distrusted = broadcast_flag(bool(self.distrusted), self.ranks)
        return metrics | {"publish/distrusted": float(len(self.distrusted))}

    def _judge(self, result: VerificationResult, pending: PendingVerification) -> None:
        """Distrust and trust engines by a verification's result."""
        for url, reason in result.wrong.items():
            fault = f"version {pending.weights}: {reason}"
            if url not in self.distrusted:
                first = self._proven.get(url, pending.version)
                self._log.error(
                    "engine %s, %s; it is left out until it shows the right weights, and what it has sampled since "
                    "version %d is refused",
                    url,
                    fault,
                    first,
                )
                self._refuse(url, first, pending.version)
            self.distrusted[url] = f"has shown wrong weights ({fault})"
            self._link.start(self._discredit(url, self.distrusted[url]))
        for url in result.right:
            self._proven[url] = pending.version
            if self.distrusted.pop(url, None):
                self._log.warning("engine %s shows the right weights again: version %s", url, pending.weights)
                self._link.start(each([self._link.client(url)], lambda engine: engine.rename_weights(pending.weights)))

    async def _discredit(self, url: str, reason: str) -> None:
        """Take the name from an engine's weights, so that nothing more that it samples counts, and drop its cache."""
        engine = self._link.client(url)
        self._link.roster.record_failure(engine.url, reason)
        await each([engine], lambda engine: engine.rename_weights(UNTRAINED, self.settings.call_timeout_s))
        await each([engine], lambda engine: engine.flush_cache(self.settings.call_timeout_s))

    def watch(
        self,
        engines: Callable[[], Collection[str]],
        version: PolicyVersion,
        *,
        fresh: bool = True,
        until: float = math.inf,
    ) -> EngineWatch:
        """Return a context that watches for engines that come back without the weights of `version`."""
        name = weight_name(version, self._process_id)
        return EngineWatch(self._link, engines, name, fresh=fresh, until=until, left_out=self._left_out)

    def close(self) -> None:
        """Leave the group and end the engines' thread; unreachable engines raise no error. A pending verification is
        cancelled. Publish nothing after this."""
        if self._pending is not None:
            self._pending.result.cancel()
        if self._left_out is not None:
            self._left_out.cancel()
        self._link.run(self._manager.shutdown())
        if self._claims is not None:
            self._link.run(self._claims.close())
        self._link.close()

    def _send(
        self, members: dict[EngineClient, ServerInfo], name: str, seconds: PhaseSeconds, verifier: WeightVerifier | None
    ) -> tuple[dict[EngineClient, ServerInfo], dict[str, str], int]:
        """Make passes over the engines until one is whole or none is left. Return the engines that took the weights,
        URL -> reason of those that failed, and the number of bytes that were sent. A collective."""
        failed = dict[str, str]()
        paused = dict[EngineClient, float]()
        num_bytes = 0
        while True:
            modes = self.settings.config.pause_mode, self.settings.call_timeout_s
            update = WeightUpdate(
                self._link, self._manager, members, name, seconds, *modes, paused, self.distrusted.keys()
            )
            self._send_buckets(update if members else None, seconds, verifier)
            failed |= update.failed
            num_bytes += update.num_bytes
            members = {engine: info for engine, info in members.items() if engine.url not in update.failed}
            if not broadcast_flag(not update.working and bool(members), self.ranks):
                return members, failed, num_bytes

    def _send_buckets(
        self, update: WeightUpdate | None, seconds: PhaseSeconds, verifier: WeightVerifier | None
    ) -> None:
        """Gather all buckets on every rank, whatever happens to the engines, and send each.

        The next bucket is gathered while one is sent. While the last is sent, the learner computes its own answer to
        the canary.
        """
        in_flight: Future[None] | None = None
        gathered = gathered_buckets(self.policy, self.ranks, self.settings.bucket_bytes)
        for bucket in seconds.measure_each("gather", gathered):
            if update is None or bucket is None:
                continue
            if in_flight is None:  # not earlier: the engines generate while the first bucket is gathered
                in_flight = self._link.start(update.begin())
            with span("wait for engines"):
                self._link.wait(in_flight)
            if update.working:
                in_flight = self._link.start(update.send(bucket))
                if verifier:
                    verifier.record_sent(bucket)
        end = self._link.start(update.end(in_flight)) if update and in_flight else None
        if verifier:  # while the last bucket is sent
            with seconds.measure("proof"):
                verifier.compute_canary()
        if end:
            with span("wait for engines"):
                self._link.wait(end)

    def _find_healthy(
        self, engines: Collection[str]
    ) -> tuple[dict[EngineClient, ServerInfo], dict[str, str], dict[str, EngineError]]:
        """Ask the engines; return those that can be sent weights, URL -> reason for those that do not answer or are
        left alone for a while, and URL -> error for healthy ones that gave no server info."""
        link, limit = self._link, self.settings.health_timeout_s
        healthy, silent = link.run(link.roster.find(engines, limit))

        async def ask(url: str) -> ServerInfo:
            info = await link.client(url).server_info(limit)
            if self._claims is not None:
                await self._claims.check(link.client(url), info, limit)
            return info

        answers = link.run(each(healthy, ask, at_once=WELL_PROBES))
        members = {link.client(url): answer for url, answer in answers.items() if not isinstance(answer, EngineError)}
        return members, silent, {u: error for u, error in answers.items() if isinstance(error, EngineError)}

    def _record_outcome(self, members: Members, dropped: Mapping[str, str], silent: Collection[str], name: str) -> None:
        """Tell the roster who took the weights, and log who did not: up to `NAMED` engines that have failed now
        although they have answered before, and all others in one line a minute."""
        if not (members or dropped):
            return

        async def record() -> list[str]:
            roster = self._link.roster
            for engine in members:
                if engine.url not in self.distrusted:
                    roster.record_success(engine.url)
            for url in dropped.keys() - set(silent):
                roster.record_failure(url, dropped[url])
            return sorted(url for url in dropped if url not in silent or roster.has_failed_now(url))

        failed = self._link.run(record())
        for url in failed[:NAMED]:
            self._log.warning("engine %s did not take version %s: %s", url, name, dropped[url])
        others = sorted(dropped.keys() - set(failed[:NAMED]))
        now = time.monotonic()
        if others and now - self._summarised_at >= SUMMARY_S:
            self._summarised_at = now
            self._log.warning(
                "%d engines did not take version %s, for example engine %s: %s (no further line for a minute)",
                len(others),
                name,
                others[0],
                dropped[others[0]],
            )

    def _check_some_engine_is_served(self, served: bool, dropped: dict[str, str]) -> None:
        """Raise TimeoutError, on every rank, if no engine has taken weights for `give_up_s`. A collective."""
        now = time.monotonic()
        if served or self._served_at is None:
            self._served_at = now
        self._has_served |= served
        silent_s = now - self._served_at
        if broadcast_flag(bool(dropped) and not served and silent_s > self.settings.give_up_s, self.ranks):
            listing = "; ".join(f"{url}: {reason}" for url, reason in [*dropped.items()][:NAMED])
            listing += f"; and {len(dropped) - NAMED} more" if len(dropped) > NAMED else ""
            raise TimeoutError(
                f"no engine has taken new weights for {silent_s:.0f} s (learner.wait_timeout_s = "
                f"{self.settings.give_up_s:g}): {listing or 'see the log of rank 0'}; restart the engines, then resume"
            )
