"""What is known of each row of logits while its tiles come and go: softmax statistics, and what its gradient needs.

Suffix: R rows. The statistics are relative to the running maximum, so that logits of any size cost no precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = -3.0e38  # below every logit, and finite: (FLOOR - FLOOR) is 0 and not NaN


@dataclass(frozen=True, slots=True)
class RowStats:
    """Running softmax statistics per row, float32 [R]; `z = (logit - largest) / temperature`."""

    largest: Tensor
    sum_exp: Tensor  # sum of exp(z)
    sum_exp_z: Tensor  # sum of exp(z) * z
    target_logit: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> RowStats:
        zeros = [torch.zeros(num_rows, device=device) for _ in range(3)]
        return cls(torch.full((num_rows,), FLOOR, device=device), *zeros)

    def rows(self, rows: slice) -> RowStats:
        """A view of some rows: folding into it folds into this."""
        return RowStats(self.largest[rows], self.sum_exp[rows], self.sum_exp_z[rows], self.target_logit[rows])

    def finish(self, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """(logprob of the target, entropy, log of sum_exp), each [R]; the last in float64, since its rounding would
        move all of a row's gradient one way."""
        log_sum = self.sum_exp.double().log()
        logprob = (self.target_logit - self.largest) / temperature - log_sum
        return logprob.float(), (log_sum - self.sum_exp_z / self.sum_exp).clamp_(min=0).float(), log_sum


@dataclass(frozen=True, slots=True)
class RowGrads:
    """What a row needs to write its logits' gradient, float32 [R] each.

    With `z` as in `RowStats`, the gradient is `exp(z) * (slope - entropy_slope * z)`, and `at_target` at the target.
    """

    largest: Tensor
    slope: Tensor
    entropy_slope: Tensor | None  # None = 0: the entropy has no gradient
    at_target: Tensor  # in full precision: 1 - p of a likely token has few digits left

    @classmethod
    def of(
        cls,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        grad_logprob: Tensor,
        grad_entropy: Tensor | None,
        temperature: float,
    ) -> RowGrads:
        """`saved`: largest, log_sum (float64), entropy, target_logit; the upstream gradients [R]."""
        largest, log_sum, entropy, target_logit = saved
        scale = (-log_sum).exp() / temperature  # float64, as all that follows
        slope, z = grad_logprob.double(), (target_logit.double() - largest) / temperature
        entropy_slope = None
        if grad_entropy is not None:
            slope = slope + grad_entropy * (entropy - log_sum)
            entropy_slope = grad_entropy * scale
        slope = -slope * scale
        at_target = slope if entropy_slope is None else slope - entropy_slope * z
        at_target = z.exp() * at_target + grad_logprob.double() / temperature
        return cls(largest, slope.float(), None if entropy_slope is None else entropy_slope.float(), at_target.float())

    def rows(self, rows: slice | Tensor) -> RowGrads:
        """A view of some rows; a copy of those that a tensor names."""
        entropy_slope = None if self.entropy_slope is None else self.entropy_slope[rows]
        return RowGrads(self.largest[rows], self.slope[rows], entropy_slope, self.at_target[rows])


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of a walk, [R, C]: float32 logits, or what a forward kept of them in half the memory."""

    values: Tensor  # logits; or, in bfloat16, exp((logit - largest) / temperature)
    banned: bool  # whether it has columns of banned tokens, whose logits are -inf
    largest: Tensor | None = None  # float32 [R], of the tile's logits, where `values` are exponentials
