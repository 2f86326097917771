"""Checks that engines hold what they were given: checksums of sampled parameters, and a canary prompt's logprobs.

One part of the model (a decoder layer, a vision block, or the rest) is sampled at a time, so that all of it is covered
in as many checks as it has parts. The canary runs while the engine generates; every rank takes part in the learner's
side of it.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from learner.distributed import Ranks, broadcast_flag
from learner.model.policy import Policy
from learner.weights.agreement import Witness, disagreements
from learner.weights.buckets import Bucket, gathered
from learner.weights.canary import Canary, gap
from learner.weights.group import Members
from learner.weights.kept import KeptWeights
from learner.weights.link import EngineLink
from learner.weights.shards import EXPERTS, Heads
from learner.weights.tolerance import CanaryTolerance
from shared.engine_api import EngineClient, EngineError, each
from shared.guards.threads import in_thread
from shared.log import get_logger
from shared.weights.adapters import is_of_adapter
from shared.weights.checksums import all_but, engine_name, part_of
from shared.weights.families import FAMILIES


class WrongWeights(ValueError):
    """An engine does not hold the weights that it was given; the message names the engine and what differs."""


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    every: int = 1  # publications
    tolerance: float = 0.0  # of the canary's mean absolute gap; 0 = derived (`learner.weights.tolerance`)
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """What one engine said of its weights. `checksums` is empty if it has none to tell."""

    logprobs: list[float]
    version: str | None
    checksums: tuple[dict[str, str], ...]


@dataclass(slots=True)
class Verdict:
    """What the engines' answers show. `gaps`: the canary's, with the kind of each engine; `limits`: of these."""

    wrong: dict[str, str] = field(default_factory=dict)
    gaps: list[tuple[str, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    num_skipped: int = 0
    num_unverified: int = 0


@dataclass(frozen=True, slots=True)
class Proof:
    """Under way, of the weights of this name."""

    weights: str
    verdict: Future[Verdict]


def hashes_compared(members: Members) -> set[EngineClient]:
    """The engines whose checksums are compared with the learner's, or with those of another engine."""
    kinds = Counter((traits.layout.kind, traits.layout.num_ranks) for traits in members.values())
    return {
        engine
        for engine, traits in members.items()
        if (layout := traits.layout).kind
        and ((layout.hashed and not layout.unknown) or kinds[layout.kind, layout.num_ranks] > 1)
    }


class WeightVerifier:
    """`due`, `compute`, `start` and `finish` are for all ranks alike; `keep` is rank 0's."""

    def __init__(
        self, policy: Policy, model_path: str, ranks: Ranks, settings: VerifierSettings = VerifierSettings()
    ) -> None:
        self._policy, self._ranks, self.settings = policy, ranks, settings
        self.canary = Canary(policy, model_path, ranks.device)
        self._log = get_logger("publisher")
        self._family = FAMILIES[policy.vlm.config.model_type]
        self._names = [self._family.published_name(name) for name, _ in policy.named_weights()]
        has_experts = any(EXPERTS in name for name in self._names)
        self.tolerance = CanaryTolerance(policy.dtype, settings.tolerance, has_experts=has_experts)
        self._parts = sorted({part_of(name) for name in self._names})
        self._turn = 0
        self._publications = 0
        self._kept = KeptWeights(Heads.of(policy.vlm.config))
        self._told: set[tuple[str, str]] = set()  # of which engines it was said why they are not compared
        self._own: list[float] = []  # the learner's logprobs of the canary's tokens
        self._unsent = set[str]()  # the server's names of parameters that no engine is sent
        self._run = uuid.uuid4().hex

    def due(self) -> bool:
        """Whether this publication is one to check. Call it once for each."""
        self._own = []
        self._publications += 1
        return (self._publications - 1) % self.settings.every == 0

    @property
    def part(self) -> str:
        """The part of the model that is sampled now."""
        return self._parts[self._turn % len(self._parts)]

    def keep(self, bucket: Bucket) -> None:
        """Remembers the sampled parameters that are sent, laid out as engines hold them."""
        for (name, values), shape in zip(bucket.values(), bucket.shapes, strict=True):
            if part_of(name) == self.part and not is_of_adapter(name):
                turned = self._family.is_turned(name)
                self._kept.keep(name, values.view(shape).mT.contiguous() if turned else values.view(shape).clone())

    def keep_unsent(self) -> None:
        """A collective: of the sampled part, what is not sent because training does not change it, which engines must
        hold as the model's files do; and what engines make of an adapter that they were sent alone."""
        adapters = self._policy.adapters
        if adapters is None:
            return
        part = {
            name for name, _ in self._policy.named_weights() if part_of(self._family.published_name(name)) == self.part
        }
        frozen = {self._family.published_name(name) for name in part - adapters.of.keys()}
        for name, values in gathered(self._policy, part if adapters.alone else part - adapters.of.keys()):
            if self._ranks.is_main:
                values = values.to(self._policy.dtype)
                self._kept.keep(name, values.mT.contiguous() if self._family.is_turned(name) else values)
        self._unsent |= {engine_name(name) for name in frozen}

    def compute(self) -> None:
        """What the learner itself answers, with the weights that it has now: once for a publication, however often it
        is asked. A collective."""
        self._own = self._own or self.canary.expected()

    def start(self, weights: str, members: Members, link: EngineLink) -> Proof:
        """Asks the engines, after `compute`. The answers are judged as soon as all have come, beside whatever the
        learner does. `finish` it before the next."""
        key, own = f"canary-{self._run}-{self._publications}", self._own
        compared = hashes_compared(members)

        async def judged() -> Verdict:
            answers = await each(members, lambda engine: self._ask(engine, key, engine in compared))
            return await in_thread(lambda: self._judge(weights, members, own, answers))

        return Proof(weights, link.start(judged()))

    def finish(self, proof: Proof, link: EngineLink) -> dict[str, float]:
        """Metrics; a collective. WrongWeights, on every rank, if an engine holds other weights; one that is silent is
        counted."""
        verdict = link.wait(proof.verdict)
        self._turn += 1
        self._kept.clear()
        wrong = verdict.wrong
        if broadcast_flag(bool(wrong), self._ranks):
            raise WrongWeights(
                "; ".join(f"engine {url}, version {proof.weights}: {reason}" for url, reason in wrong.items())
                or f"an engine holds other weights than version {proof.weights}: rank 0 names it"
            )
        for kind, value in verdict.gaps:
            self.tolerance.passed(kind, value)
        return {
            "publish/canary_gap": max((value for _, value in verdict.gaps), default=0.0),
            "publish/canary_tolerance": max(verdict.limits, default=self.tolerance.ceiling),
            "publish/checksum_gap": 0.0,  # parameters that differ; any other number has stopped the run
            "publish/checksum_skipped": float(verdict.num_skipped),
            "publish/unproven": float(verdict.num_unverified),
        }

    # ------------------------------------------------------------------ what it is made of

    def _judge(
        self, weights: str, members: Members, own: list[float], answers: Mapping[EngineClient, object]
    ) -> Verdict:
        """`own`: the learner's logprobs of the canary's tokens."""
        found, witnesses = Verdict(), dict[str, Witness]()
        for engine, answer in answers.items():
            if not isinstance(answer, EngineWeights):
                found.num_unverified += 1
                reason = answer.reason if isinstance(answer, EngineError) else answer
                self._log.warning("engine %s did not confirm version %s: %s", engine.url, weights, reason)
                continue
            layout = members[engine].layout
            off, limit = gap(own, answer.logprobs), self.tolerance.of(layout.kind)
            found.gaps.append((layout.kind, off))
            found.limits.append(limit)
            different, unknown = self._kept.compare(answer.checksums, layout, self._policy.dtype)
            witnesses[engine.url] = Witness(layout.kind, answer.checksums, unknown)
            found.num_skipped += len(unknown)
            self._tell(engine, unknown)
            if different:
                found.wrong[engine.url] = self._told_of(different)
            elif reason := self._canary_fault(answer, off, limit, weights):
                found.wrong[engine.url] = reason
        found.wrong = disagreements(witnesses) | found.wrong
        return found

    async def _ask(self, engine: EngineClient, key: str, hashes: bool) -> EngineWeights:
        """With its checksums where `hashes` are wanted."""
        canary, limit = self.canary, self.settings.timeout_s
        banned = self._policy.banned_ids
        logprobs, version = await engine.next_logprobs(
            canary.token_ids, [canary.image], canary.watched, banned, key, limit
        )
        checksums: tuple[dict[str, str], ...] = ()
        if hashes:
            try:
                checksums = await engine.checksums(all_but(self.part, self._names), limit)
            except EngineError as error:
                self._log.debug("%s tells no checksums: %s", engine.url, error.reason)
        return EngineWeights(logprobs, version, checksums)

    def _told_of(self, different: list[str]) -> str:
        words = f"holds other values of {', '.join(different[:3])} than "
        if not self._unsent.issuperset(different):
            if self._policy.adapters is None or not self._policy.adapters.alone:
                return words + "it was sent"
            return words + (
                "the adapter that it was sent makes of model.path: start it anew, from that folder, and if it rounds "
                "otherwise set learner.lora.publish = 'merged'"
            )
        return words + "model.path has, which adapters leave as they are: start it anew, from that folder"

    def _tell(self, engine: EngineClient, unknown: Mapping[str, str]) -> None:
        """Says once for each reason why checksums are not compared with the learner's."""
        for reason in sorted(set(unknown.values())):
            if (engine.url, reason) not in self._told:
                self._told.add((engine.url, reason))
                name = min(name for name, why in unknown.items() if why == reason)
                words = "checksums of engine %s, such as that of %s, are not compared with the learner's: %s"
                self._log.info(words, engine.url, name, reason)

    def _canary_fault(self, answer: EngineWeights, value: float, limit: float, weights: str) -> str:
        if answer.version not in (None, weights):
            return f"says that its weights are version {answer.version}"
        if value > limit:
            return (
                f"the canary prompt's logprobs are {value:.3g} off the learner's in the mean, above "
                f"{limit:g} (learner.publish.canary_tolerance)"
            )
        return ""
