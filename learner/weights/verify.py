"""Proof that engines hold what they were given: checksums of sampled parameters, and a canary prompt's logprobs.

One part of the model (a decoder layer, a vision block, or the rest) is sampled at a time, so that all of it is covered
in as many proofs as it has parts. The canary runs while the engine generates; every rank takes part in the learner's
side of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.distributed import Ranks, broadcast_flag
from learner.model.policy import Policy
from learner.weights.buckets import Bucket
from learner.weights.calls import EngineError, EngineTraits, call, each, failures, start
from learner.weights.canary import Canary, gap
from shared.log import get_logger
from shared.types import PolicyVersion
from shared.weight_names import all_but, checksums, part_of

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
class Finding:
    """What one engine said. `checksums` is None if it has none to tell."""

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
        self._names = [name for name, _ in policy.named_weights()]
        self._parts = sorted({part_of(name) for name in self._names})
        self._turn = 0
        self._publications = 0
        self._kept: dict[str, Tensor] = {}
        self._run = uuid.uuid4().hex

    def due(self) -> bool:
        """Whether this publication is one to prove. Call it once for each."""
        self._publications += 1
        return (self._publications - 1) % self.settings.every == 0

    @property
    def part(self) -> str:
        """The part of the model that is sampled now."""
        return self._parts[self._turn % len(self._parts)]

    def keep(self, bucket: Bucket) -> None:
        """Remembers the sampled parameters as they are sent."""
        for (name, values), shape in zip(bucket.values(), bucket.shapes, strict=True):
            padded = name.endswith(_VOCABULARY) and shape[0] % VOCABULARY_UNIT
            if part_of(name) == self.part and not padded:
                self._kept[name] = values.clone()

    def check(self, version: PolicyVersion, members: Mapping[str, EngineTraits]) -> dict[str, float]:
        """Metrics. WrongWeights, on every rank, if an engine holds other weights; one that is silent is counted."""
        limit = self.settings.timeout_s
        key = f"canary-{self._run}-{self._publications}"

        def ask(url: str) -> Finding:
            return self._ask(url, key, checksums_too=members[url].tells_checksums)

        asked = start(each, members, ask, 2 * limit + 1)
        own = self.canary.expected()
        found = asked.result()
        wrong, gaps, skipped = dict[str, str](), [0.0], 0
        for url, finding in found.items():
            if isinstance(finding, Finding):
                gaps.append(gap(own, finding.logprobs))
                reason = self._canary_fault(finding, gaps[-1], version)
                different, missing = self._compare(finding.checksums)
                skipped += missing
                if different:
                    reason = f"holds other values of {', '.join(different[:3])} than it was sent"
                if reason:
                    wrong[url] = reason
        silent = failures(found)
        for url, why in silent.items():
            self._log.warning("engine %s gave no proof of version %d: %s", url, version, why)
        self._turn += 1
        self._kept.clear()
        if broadcast_flag(bool(wrong), self._ranks):
            raise WrongWeights(
                "; ".join(f"engine {url}, version {version}: {reason}" for url, reason in wrong.items())
                or f"an engine holds other weights than version {version}: rank 0 names it"
            )
        return {
            "publish/canary_gap": max(gaps),
            "publish/checksum_gap": 0.0,  # parameters that differ; any other number has stopped the run
            "publish/checksum_skipped": float(skipped),
            "publish/unproven": float(len(silent)),
        }

    # ------------------------------------------------------------------ what it is made of

    def _ask(self, url: str, key: str, *, checksums_too: bool) -> Finding:
        answer = call(url, "/generate", self.canary.request(key), self.settings.timeout_s)
        try:
            logprobs = self.canary.read(answer)
        except ValueError as error:
            raise EngineError(url, str(error)) from error
        version = answer["meta_info"].get("weight_version")
        sums = self._ask_checksums(url) if checksums_too else None
        return Finding(logprobs, None if version is None else str(version), sums)

    def _ask_checksums(self, url: str) -> dict[str, str] | None:
        body = {"action": "checksum", "skip_tensor_list": all_but(self.part, self._names)}
        try:
            ranks = call(url, "/weights_checker", body, self.settings.timeout_s)["ranks"]
            return dict(ranks[0]["checksums"]) if len(ranks) == 1 else None  # a sharded engine holds no whole ones
        except (EngineError, TypeError, KeyError, ValueError) as error:
            self._log.debug("%s tells no checksums: %s", url, error)
            return None

    def _canary_fault(self, finding: Finding, value: float, version: PolicyVersion) -> str:
        if finding.version not in (None, str(version)):
            return f"says that its weights are version {finding.version}"
        if value > self.tolerance:
            return (
                f"the canary prompt's logprobs are {value:.3g} off the learner's in the mean, above "
                f"{self.tolerance:g} (learner.canary_tolerance)"
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
                yield name, values.to(dtype).cpu().view(torch.uint8).numpy().data

        return checksums(raw())
