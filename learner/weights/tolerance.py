"""How far an engine's answer to the canary prompt may be off the learner's, derived from what sound engines show.

Nobody knows a run's noise beforehand: it is the model's, the dtype's and the kernels'. So the first proof is judged by
its checksums and by a ceiling for the dtype, and every later one by a multiple of the largest gap that passed. Noise
that grows with the weights takes the tolerance along; weights that are not the learner's are off at once, by more.
"""

from __future__ import annotations

import torch

CEILING = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # logits of 16 to 32 are 0.125 apart in bfloat16
FLOOR = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # as the alarm on publish/canary_gap: below it nothing is amiss
NOISE_MULTIPLE = 5.0
"""The gap is a mean of 16 errors that share one error, the normaliser's, so the largest of a few gaps says little more
than the scale of the noise: five times that is a chance of one in a million, if errors are normal, and still far below
the ceiling."""


class CanaryTolerance:
    """One tolerance for each kind of engine (`shared.weights.layout`), because kinds differ in their noise."""

    def __init__(self, dtype: torch.dtype, fixed: float = 0.0, *, has_experts: bool = False) -> None:
        """`fixed`, where it is not 0, is the tolerance throughout. With experts and coarse rounding it is the ceiling:
        a token that is routed otherwise is a jump, which says nothing against the weights."""
        self.ceiling, self._fixed = CEILING[dtype], fixed
        self._floor = self.ceiling if has_experts and dtype != torch.float32 else FLOOR[dtype]
        self._noise: dict[str, float] = {}

    def of(self, kind: str) -> float:
        """The largest gap that the next proof of an engine of this kind may have."""
        if self._fixed:
            return self._fixed
        if kind not in self._noise:
            return self.ceiling
        return min(max(NOISE_MULTIPLE * self._noise[kind], self._floor), self.ceiling)

    def passed(self, kind: str, gap: float) -> None:
        """Takes note of a gap in a proof that found nothing wrong."""
        self._noise[kind] = max(gap, self._noise.get(kind, 0.0))
