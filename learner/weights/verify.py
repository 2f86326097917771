"""Checks that engines hold what they were given: checksums of sampled parameters, and a canary prompt's logprobs.

One part of the model (a decoder layer, a vision block, or the rest) is sampled at a time, so that all of it is covered
in as many checks as it has parts. The canary runs while the engine generates; every rank takes part in the learner's
side of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.distributed import Ranks, broadcast_flag
from learner.model.policy import Policy
from learner.weights.buckets import Bucket
from learner.weights.canary import Canary, gap
from learner.weights.group import Members
from learner.weights.link import EngineLink
from shared.engine_api import EngineClient, EngineError, each
from shared.engine_messages import EngineTraits
from shared.log import get_logger
from shared.weights.checksums import all_but, checksums, part_of
from shared.weights.families import FAMILIES

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # logits of 16 to 32 are 0.125 apart in bfloat16
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
VOCABULARY_UNIT = 64  # a server fills these up to a multiple: others cannot be compared
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WrongWeights(ValueError):
    """An engine does not hold the weights that it was given; the message names the engine and what differs."""


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    every: int = 1  # publications
    tolerance: float = 0.0  # of the canary's mean absolute gap; 0 = by the dtype
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """What one engine said of its weights. `checksums` is None if it has none to tell."""

    logprobs: list[float]
    version: str | None
    checksums: dict[str, str] | None


class WeightVerifier:
    """`due` and `check` are for all ranks alike; `keep` is rank 0's."""

    def __init__(
        self, policy: Policy, model_path: str, ranks: Ranks, settings: VerifierSettings = VerifierSettings()
    ) -> None:
        self._policy, self._ranks, self.settings = policy, ranks, settings
        self.canary = Canary(policy, model_path, ranks.device)
        self.tolerance = settings.tolerance or TOLERANCE[policy.dtype]
        self._log = get_logger("publisher")
        self._family = FAMILIES[policy.vlm.config.model_type]
        self._names = [self._family.published_name(name) for name, _ in policy.named_weights()]
        self._parts = sorted({part_of(name) for name in self._names})
        self._turn = 0
        self._publications = 0
        self._kept: dict[str, Tensor] = {}
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
            padded = name.endswith(_VOCABULARY) and shape[0] % VOCABULARY_UNIT
            if part_of(name) == self.part and not padded:
                turned = self._family.is_turned(name)
                self._kept[name] = values.view(shape).mT.contiguous() if turned else values.clone()

    def check(self, weights: str, members: Members, link: EngineLink) -> dict[str, float]:
        """Metrics. WrongWeights, on every rank, if an engine holds other weights; one that is silent is counted."""
        key = f"canary-{self._run}-{self._publications}"
        asked = link.start(each(members, lambda engine: self._ask(engine, key, members[engine])))
        own = self.canary.expected()
        wrong, gaps, skipped, num_unverified = dict[str, str](), [0.0], 0, 0
        for engine, answer in link.wait(asked).items():
            if isinstance(answer, EngineError):
                num_unverified += 1
                self._log.warning("engine %s did not confirm version %s: %s", engine.url, weights, answer.reason)
                continue
            gaps.append(gap(own, answer.logprobs))
            different, missing = self._compare(answer.checksums)
            skipped += missing
            if different:
                wrong[engine.url] = f"holds other values of {', '.join(different[:3])} than it was sent"
            elif reason := self._canary_fault(answer, gaps[-1], weights):
                wrong[engine.url] = reason
        self._turn += 1
        self._kept.clear()
        if broadcast_flag(bool(wrong), self._ranks):
            raise WrongWeights(
                "; ".join(f"engine {url}, version {weights}: {reason}" for url, reason in wrong.items())
                or f"an engine holds other weights than version {weights}: rank 0 names it"
            )
        return {
            "publish/canary_gap": max(gaps),
            "publish/checksum_gap": 0.0,  # parameters that differ; any other number has stopped the run
            "publish/checksum_skipped": float(skipped),
            "publish/unproven": float(num_unverified),
        }

    # ------------------------------------------------------------------ what it is made of

    async def _ask(self, engine: EngineClient, key: str, traits: EngineTraits) -> EngineWeights:
        canary, limit = self.canary, self.settings.timeout_s
        banned = self._policy.banned_ids
        logprobs, version = await engine.next_logprobs(
            canary.token_ids, [canary.image], canary.watched, banned, key, limit
        )
        checksums = None
        if traits.tells_checksums:
            try:
                checksums = await engine.checksums(all_but(self.part, self._names), limit)
            except EngineError as error:
                self._log.debug("%s tells no checksums: %s", engine.url, error.reason)
        return EngineWeights(logprobs, version, checksums)

    def _canary_fault(self, answer: EngineWeights, value: float, weights: str) -> str:
        if answer.version not in (None, weights):
            return f"says that its weights are version {answer.version}"
        if value > self.tolerance:
            return (
                f"the canary prompt's logprobs are {value:.3g} off the learner's in the mean, above "
                f"{self.tolerance:g} (learner.publish.canary_tolerance)"
            )
        return ""

    def _compare(self, theirs: dict[str, str] | None) -> tuple[list[str], int]:
        """The engine's parameters that differ from what was sent, and how many it does not tell."""
        own = self._own_checksums(self._policy.dtype)
        if theirs is None:
            return [], len(own)
        told = [name for name in own if name in theirs]
        different = [name for name in told if theirs[name] != own[name]]
        for dtype in _DTYPES:  # the engine may hold what it was sent in a dtype of its own
            if different:
                cast = self._own_checksums(dtype)
                different = [name for name in different if theirs[name] != cast[name]]
        return different, len(own) - len(told)

    def _own_checksums(self, dtype: torch.dtype) -> dict[str, str]:
        def raw() -> Iterable[tuple[str, memoryview]]:
            for name, values in self._kept.items():
                yield name, values.to(dtype).cpu().flatten().view(torch.uint8).numpy().data

        return checksums(raw())
