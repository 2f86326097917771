"""Which rows have an upstream gradient: the others need no backward."""

from __future__ import annotations

import torch
from torch import Tensor


class RowsWithGradient:
    """NaN counts as a gradient. On a GPU the answer travels to the host while the first slice is computed: the host
    then waits for what precedes that slice, the GPU for nothing."""

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
        """How many slices of the vocabulary are computed for all rows before the answer is asked for."""
        return 0 if self._arrived is None else 1

    def rows(self) -> Tensor | None:
        """Their numbers, int64 on the CPU, ascending; None = all."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return None if bool(self._has_N.all()) else self._has_N.nonzero()[:, 0]
