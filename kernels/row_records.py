"""Records per row of logits that outlive the row's tiles: softmax statistics, and the values that its gradient needs.

Suffix: R rows. The statistics are relative to the running maximum, so that large logits lose no precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = -3.0e38  # below every logit, and finite, so that FLOOR - FLOOR is 0 and not NaN


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
        """Return a view of some rows: folding into the view updates these statistics."""
        return RowStats(self.largest[rows], self.sum_exp[rows], self.sum_exp_z[rows], self.target_logit[rows])

    def finish(self, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logprob of the target, entropy, log of sum_exp), each [R]. The last is float64, since its rounding
        error would shift a row's whole gradient in one direction."""
        log_sum = self.sum_exp.double().log()
        logprob = (self.target_logit - self.largest) / temperature - log_sum
        return logprob.float(), (log_sum - self.sum_exp_z / self.sum_exp).clamp_(min=0).float(), log_sum


@dataclass(frozen=True, slots=True)
class RowGrads:
    """The values from which a row's gradient is computed, float32 [R] each.

    With `z` as in `RowStats`, the gradient is `exp(z) * (slope - entropy_slope * z)`, except at the target, where it is
    `at_target`.
    """

    largest: Tensor
    slope: Tensor
    entropy_slope: Tensor | None  # None: the entropy has no upstream gradient
    at_target: Tensor  # computed in float64: 1 - p of a likely token would lose most of its digits

    @classmethod
    def of(
        cls,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        grad_logprob: Tensor,
        grad_entropy: Tensor | None,
        temperature: float,
    ) -> RowGrads:
        """Compute the records from the forward's results and the upstream gradients [R]. `saved`: largest, log_sum
        (float64), entropy, target_logit."""
        largest, log_sum, entropy, target_logit = saved
        scale = (-log_sum).exp() / temperature  # float64, like all that follows
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
        """Return a view of a slice of rows, or a copy of the rows whose indices a tensor gives."""
        entropy_slope = None if self.entropy_slope is None else self.entropy_slope[rows]
        return RowGrads(self.largest[rows], self.slope[rows], entropy_slope, self.at_target[rows])


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of logits, [R, C]: float32 logits, or their exponentials in half the memory, which a forward has
    kept."""

    values: Tensor  # logits; or, in bfloat16, exp((logit - largest) / temperature)
    banned: bool  # some columns are banned tokens, whose logits are -inf
    largest: Tensor | None = None  # float32 [R], largest logit of each row in this tile, if `values` are exponentials


class RowsWithGradient:
    """The rows with an upstream gradient; the others need no backward. NaN counts as a gradient.

    On a GPU the result is copied to the host while the first slice is computed. Only the host waits, for the work
    before that slice.
    """

    def __init__(self, grad_logprob_N: Tensor, grad_entropy_N: Tensor | None) -> None:
        has_N = grad_logprob_N != 0
        if grad_entropy_N is not None:
            has_N |= grad_entropy_N != 0
        self._has_N, self._arrived = has_N, None
        if has_N.is_cuda:
            self._has_N = torch.empty(has_N.shape, dtype=torch.bool, pin_memory=True).copy_(has_N, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def slices_before(self) -> int:
        """The number of vocabulary slices that are computed for all rows before `rows` is called."""
        return 0 if self._arrived is None else 1

    def rows(self) -> Tensor | None:
        """Return the indices of these rows, int64 on the CPU, ascending; None = all rows."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return None if bool(self._has_N.all()) else self._has_N.nonzero()[:, 0]
