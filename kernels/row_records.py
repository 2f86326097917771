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
        zeros = torch.zeros((3, num_rows), device=device)
        return cls(torch.full((num_rows,), FLOOR, device=device), zeros[0], zeros[1], zeros[2])

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
    """What a row needs to write its logits' gradient, float32 [R] each, `log_sum` float64."""

    largest: Tensor
    log_sum: Tensor
    entropy: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor | None

    def rows(self, rows: slice) -> RowGrads:
        """A view of some rows."""
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy[rows]
        return RowGrads(
            self.largest[rows], self.log_sum[rows], self.entropy[rows], self.grad_logprob[rows], grad_entropy
        )
