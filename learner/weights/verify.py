"""Checks that engines hold what they were given: checksums of sampled parameters, and a canary prompt's logprobs.

One part of the model (a decoder layer, a vision block, or the rest) is sampled at a time, so that all of it is covered
in as many checks as it has parts. The canary runs while the engine generates; every rank takes part in the learner's
side of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

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
from shared.engine_messages import EngineTraits
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


class WeightVerifier:
    """`due` and `check` are for all ranks alike; `keep` is rank 0's."""

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
        self._unsent = set[str]()  # the server's names of parameters that no engine is sent
        self._run = uuid.uuid4().hex

    def due(self) -> bool:
        """Whether this publication is one to check. Call it once for each."""
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

    def check(self, weights: str, members: Members, link: EngineLink) -> dict[str, float]:
        """Metrics. WrongWeights, on every rank, if an engine holds other weights; one that is silent is counted."""
        key = f"canary-{self._run}-{self._publications}"
        asked = link.start(each(members, lambda engine: self._ask(engine, key, members[engine])))
        own = self.canary.expected()
        wrong, witnesses, num_skipped, num_unverified = dict[str, str](), dict[str, Witness](), 0, 0
        gaps, limits = dict[EngineClient, float](), list[float]()
        for engine, answer in link.wait(asked).items():
            if isinstance(answer, EngineError):
                num_unverified += 1
                self._log.warning("engine %s did not confirm version %s: %s", engine.url, weights, answer.reason)
                continue
            layout = members[engine].layout
            gaps[engine] = gap(own, answer.logprobs)
            limits.append(self.tolerance.of(layout.kind))
            different, unknown = self._kept.compare(answer.checksums, layout, self._policy.dtype)
            witnesses[engine.url] = Witness(layout.kind, answer.checksums, unknown)
            num_skipped += len(unknown)
            self._tell(engine, unknown)
            if different:
                wrong[engine.url] = self._told_of(different)
            elif reason := self._canary_fault(answer, gaps[engine], limits[-1], weights):
                wrong[engine.url] = reason
        wrong = disagreements(witnesses) | wrong
        self._turn += 1
        self._kept.clear()
        if broadcast_flag(bool(wrong), self._ranks):
            raise WrongWeights(
                "; ".join(f"engine {url}, version {weights}: {reason}" for url, reason in wrong.items())
                or f"an engine holds other weights than version {weights}: rank 0 names it"
            )
        for engine, value in gaps.items():
            self.tolerance.passed(members[engine].layout.kind, value)
        return {
            "publish/canary_gap": max(gaps.values(), default=0.0),
            "publish/canary_tolerance": max(limits, default=self.tolerance.ceiling),
            "publish/checksum_gap": 0.0,  # parameters that differ; any other number has stopped the run
            "publish/checksum_skipped": float(num_skipped),
            "publish/unproven": float(num_unverified),
        }

    # ------------------------------------------------------------------ what it is made of

    async def _ask(self, engine: EngineClient, key: str, traits: EngineTraits) -> EngineWeights:
        canary, limit = self.canary, self.settings.timeout_s
        banned = self._policy.banned_ids
        logprobs, version = await engine.next_logprobs(
            canary.token_ids, [canary.image], canary.watched, banned, key, limit
        )
        checksums: tuple[dict[str, str], ...] = ()
        if traits.layout.kind:
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
