"""Verification that engines hold the weights that they were sent: checksums of sampled parameters, and the canary's
logprobs.

One part of the model (a decoder layer, a vision block, or the rest) is sampled at a time, so that as many verifications
as there are parts cover the whole model. If an engine computes its checksums of the bytes that were sent, as the
embedded engine does, they must equal the learner's. Any other engine is compared with the engines of its kind: they lay
out their weights alike and were sent the same, so their checksums must be equal, whatever they are computed of.

The canary runs while the engine generates; every rank takes part in the learner's side of it.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.distributed import Ranks, broadcast_flag
from learner.model.policy import Policy
from learner.weights.canary import Canary, CanaryTolerance, gap
from learner.weights.engine_link import EngineLink
from learner.weights.gathering import Bucket, gathered
from learner.weights.weight_group import Members
from shared.config.learner_section import PublishConfig
from shared.engine.adapter_names import is_of_adapter
from shared.engine.checksums import all_but, checksums, engine_name, part_of
from shared.engine.engine_api import EngineClient, EngineError, each
from shared.engine.engine_messages import UNTRAINED, parse_weight_name
from shared.families.registry import FAMILIES
from shared.log import get_logger
from shared.types import PolicyVersion
from shared.util.threads import in_thread

ANSWER_S = 30.0
DEFAULTS = PublishConfig()
EXPERTS = ".mlp.experts."
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes in which an engine may hold the weights
RankChecksums = tuple[dict[str, str], ...]
"""Checksums by the engine's names of parameters, of each of its tensor-parallel ranks."""


class WrongWeights(ValueError):
    """No engine holds the weights that it was given; the message names the engines and what differs."""


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """One engine's answer about its weights. `checksums` is empty if it reports none."""

    logprobs: list[float]
    version: str | None
    checksums: RankChecksums


@dataclass(slots=True)
class VerificationResult:
    """The judgement of the engines' answers.

    `wrong`: URL -> fault. `gaps`: URL -> (kind of the engine, canary gap, its tolerance), also of wrong engines.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    gaps: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    num_skipped: int = 0
    num_unverified: int = 0

    @property
    def right(self) -> dict[str, tuple[str, float, float]]:
        """The entries of `gaps` of the engines that hold what they were sent."""
        return {url: entry for url, entry in self.gaps.items() if url not in self.wrong}


@dataclass(frozen=True, slots=True)
class PendingVerification:
    """A running verification of the weights with the name `weights`, which engines hold as `version`."""

    weights: str
    version: PolicyVersion
    result: Future[VerificationResult]


class SampledWeights:
    """The sampled parameters of one publication by their published names, in the layout of the engines."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._checksums: dict[torch.dtype, dict[str, str]] = {}

    @property
    def engine_names(self) -> set[str]:
        return {engine_name(name) for name in self._values}

    def record(self, name: str, values: Tensor) -> None:
        """Add a parameter."""
        self._values[name] = values

    def clear(self) -> None:
        """Forget all parameters."""
        self._values.clear()
        self._checksums.clear()

    def compare(self, reported: Mapping[str, str], dtype: torch.dtype) -> tuple[list[str], set[str]]:
        """Compare an engine's checksums with what was sent as `dtype`; return the engine's names of the parameters that
        differ, and of those whose checksum is not reported."""
        missing = self.engine_names - reported.keys()
        different = sorted(self.engine_names - missing)
        for cast in (dtype, *DTYPES):
            if different:
                sent = self._checksums_as(cast)
                different = [name for name in different if sent[name] != reported[name]]
        return different, missing

    def _checksums_as(self, dtype: torch.dtype) -> dict[str, str]:
        if dtype not in self._checksums:
            cast = ((name, values.to(dtype).cpu().flatten().view(torch.uint8)) for name, values in self._values.items())
            self._checksums[dtype] = checksums((name, data.numpy().data) for name, data in cast)
        return self._checksums[dtype]


def find_disagreements(reported: Mapping[str, RankChecksums]) -> dict[str, str]:
    """Return URL -> fault of the engines whose checksums differ from those of most. `reported`: engines of one kind
    with equally many ranks.

    If no value of a checksum has a majority, all engines that report it are returned.
    """
    wrong: dict[str, str] = {}
    num_ranks = max((len(by_rank) for by_rank in reported.values()), default=0)
    for rank in range(num_ranks):
        for name in sorted({name for by_rank in reported.values() for name in by_rank[rank]}):
            values = {url: by_rank[rank][name] for url, by_rank in sorted(reported.items()) if name in by_rank[rank]}
            ((usual, count),) = Counter(values.values()).most_common(1)
            has_majority = 2 * count > len(values)
            for url, value in values.items():
                if len(set(values.values())) == 1 or (has_majority and value == usual):
                    continue
                others = [other for other in values if values[other] != value]
                if has_majority:
                    others = [other for other in others if values[other] == usual]
                on_rank = f" on its rank {rank}" if num_ranks > 1 else ""
                wrong.setdefault(
                    url, f"holds other values of {name}{on_rank} than {_list(others)}, though all were sent the same"
                )
    return wrong


def _list(urls: Sequence[str]) -> str:
    return ", ".join(urls[:3]) + (f" and {len(urls) - 3} more" if len(urls) > 3 else "")


def engines_with_comparable_checksums(members: Members) -> set[EngineClient]:
    """Return the engines whose checksums can be compared with the learner's or with those of another engine."""
    kinds = Counter((info.kind, info.num_ranks) for info in members.values())
    return {
        engine
        for engine, info in members.items()
        if info.checksums_as_sent or (info.kind and kinds[info.kind, info.num_ranks] > 1)
    }


class WeightVerifier:
    """Verifies the engines' weights at every `verify_every`-th publication.

    All ranks call `is_due`, `record_frozen`, `compute_canary`, `start` and `finish`; only rank 0 calls `record_sent`.
    """

    def __init__(
        self,
        policy: Policy,
        model_path: str,
        ranks: Ranks,
        config: PublishConfig = DEFAULTS,
        *,
        timeout_s: float = ANSWER_S,
    ) -> None:
        """Build the canary prompt. `timeout_s`: time limit for each answer of an engine."""
        self._policy = policy
        self._ranks = ranks
        self._every = config.verify_every
        self.timeout_s = timeout_s
        self.canary = Canary(policy, model_path, ranks.device)
        self._log = get_logger("publisher")
        self._family = FAMILIES[policy.vlm.config.model_type]
        self._names = [self._family.published_name(name) for name, _ in policy.named_weights()]
        has_experts = any(EXPERTS in name for name in self._names)
        self.tolerance = CanaryTolerance(policy.dtype, config.canary_tolerance, has_experts=has_experts)
        self._parts = sorted({part_of(name) for name in self._names})
        self._num_verified = 0
        self._publications = 0
        self._sampled = SampledWeights()
        self._expected: list[float] = []  # the learner's logprobs of the canary's tokens
        self._unsent = set[str]()  # engines' names of parameters that are never sent
        self._run = uuid.uuid4().hex
        self._has_passed = False  # an engine has shown the right weights

    def is_due(self) -> bool:
        """Tell whether this publication is to be verified. Call it once for each publication."""
        self._expected = []
        self._publications += 1
        return (self._publications - 1) % self._every == 0

    @property
    def part(self) -> str:
        """The part of the model that is sampled now."""
        return self._parts[self._num_verified % len(self._parts)]

    def record_sent(self, bucket: Bucket) -> None:
        """Store the sampled parameters that are sent, in the layout of the engines."""
        for (name, values), shape in zip(bucket.values(), bucket.shapes, strict=True):
            if part_of(name) == self.part and not is_of_adapter(name):
                transposed = self._family.is_transposed(name)
                values = values.view(shape)
                self._sampled.record(name, values.mT.contiguous() if transposed else values.clone())

    def record_frozen(self) -> None:
        """Store those parameters of the sampled part that are not sent. A collective.

        They are the weights that training does not change, which engines must hold as the model's files have them; and,
        where only adapters are sent, the merged weights that engines compute from them.
        """
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
                self._sampled.record(name, values.mT.contiguous() if self._family.is_transposed(name) else values)
        self._unsent |= {engine_name(name) for name in frozen}

    def compute_canary(self) -> None:
        """Compute the learner's own answer to the canary with its present weights, once for each publication. A
        collective."""
        self._expected = self._expected or self.canary.expected_logprobs()

    def start(
        self, weights: str, members: Members, link: EngineLink, distrusted: Collection[str] = ()
    ) -> PendingVerification:
        """Ask the engines, after `compute_canary`. The answers are judged in the background as soon as all have come.
        Call `finish` before the next start. `distrusted`: engines that were sent the weights without their name."""
        key, expected = f"canary-{self._run}-{self._publications}", self._expected
        comparable = engines_with_comparable_checksums(members)

        async def verify() -> VerificationResult:
            answers = await each(members, lambda engine: self._ask(engine, key, engine in comparable))
            names = {engine.url: UNTRAINED if engine.url in distrusted else weights for engine in members}
            return await in_thread(lambda: self._judge(names, members, expected, answers))

        return PendingVerification(weights, parse_weight_name(weights)[0], link.start(verify()))

    def finish(self, pending: PendingVerification, link: EngineLink) -> tuple[VerificationResult, dict[str, float]]:
        """Wait for the answers and return them, judged, and metrics. A collective.

        Raise WrongWeights, on every rank, if engines hold other weights and none has ever held the right ones: a
        mistake of the setup, which time does not mend. An engine without an answer is only counted.
        """
        result = link.wait(pending.result)
        self._num_verified += not result.wrong  # a wrong engine has to show the part that was wrong
        self._sampled.clear()
        self._has_passed |= bool(result.right)
        if broadcast_flag(bool(result.wrong) and not self._has_passed, self._ranks):
            raise WrongWeights(
                "; ".join(f"engine {url}, version {pending.weights}: {why}" for url, why in result.wrong.items())
                or f"an engine holds other weights than version {pending.weights}: rank 0 names it"
            )
        right = result.right.values()
        for kind, value, _ in right:
            self.tolerance.record_passed(kind, value)
        return result, {
            "publish/canary_gap": max((value for _, value, _ in right), default=0.0),
            "publish/canary_tolerance": max((limit for _, _, limit in right), default=self.tolerance.ceiling),
            # The number of parameters that differ at the engines that are used: always 0, others are left out.
            "publish/checksum_gap": 0.0,
            "publish/checksum_skipped": float(result.num_skipped),
            "publish/unproven": float(result.num_unverified),
        }

    # ------------------------------------------------------------------ the answers

    def _judge(
        self,
        names: Mapping[str, str],
        members: Members,
        expected: list[float],
        answers: Mapping[EngineClient, object],
    ) -> VerificationResult:
        """Judge the answers. `names`: URL -> the name that the engine's weights should have."""
        result = VerificationResult()
        alike: dict[tuple[str, int], dict[str, RankChecksums]] = {}  # by (kind, number of ranks), then by URL
        for engine, answer in answers.items():
            if not isinstance(answer, EngineWeights):
                result.num_unverified += 1
                reason = answer.reason if isinstance(answer, EngineError) else answer
                self._log.warning("engine %s did not confirm version %s: %s", engine.url, names[engine.url], reason)
                continue
            info = members[engine]
            canary_gap, limit = gap(expected, answer.logprobs), self.tolerance.limit(info.kind)
            result.gaps[engine.url] = info.kind, canary_gap, limit
            different, missing = list[str](), self._sampled.engine_names
            if info.checksums_as_sent:
                reported = answer.checksums[0] if answer.checksums else {}
                different, missing = self._sampled.compare(reported, self._policy.dtype)
            elif info.kind:
                alike.setdefault((info.kind, len(answer.checksums)), {})[engine.url] = answer.checksums
            result.num_skipped += len(missing)
            if different:
                result.wrong[engine.url] = self._describe(different)
            elif reason := self._canary_fault(answer, canary_gap, limit, names[engine.url]):
                result.wrong[engine.url] = reason
        for reported_by_kind in alike.values():
            result.wrong = find_disagreements(reported_by_kind) | result.wrong
        return result

    async def _ask(self, engine: EngineClient, key: str, with_checksums: bool) -> EngineWeights:
        canary, limit = self.canary, self.timeout_s
        banned = self._policy.banned_ids
        logprobs, version = await engine.next_logprobs(
            canary.token_ids, canary.images, canary.watched, banned, key, limit
        )
        reported: RankChecksums = ()
        if with_checksums:
            try:
                reported = await engine.checksums(all_but(self.part, self._names), limit)
            except EngineError as error:
                self._log.debug("%s tells no checksums: %s", engine.url, error.reason)
        return EngineWeights(logprobs, version, reported)

    def _describe(self, different: list[str]) -> str:
        words = f"holds other values of {', '.join(different[:3])} than "
        if not self._unsent.issuperset(different):
            if self._policy.adapters is None or not self._policy.adapters.alone:
                return words + "it was sent"
            return words + (
                "the adapter that it was sent makes of model.path: start it anew, from that folder, and if it rounds "
                "otherwise set learner.lora.publish = 'merged'"
            )
        return words + "model.path has, which adapters leave as they are: start it anew, from that folder"

    def _canary_fault(self, answer: EngineWeights, canary_gap: float, limit: float, weights: str) -> str:
        if answer.version not in (None, weights):
            return f"says that its weights are version {answer.version}"
        if canary_gap > limit:
            return (
                f"the canary prompt's logprobs are {canary_gap:.3g} off the learner's in the mean, above "
                f"{limit:g} (learner.publish.canary_tolerance)"
            )
        return ""
