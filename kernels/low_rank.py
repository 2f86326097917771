"""A weight with its adapter merged, computed bit for bit alike by learner, engines and exports."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, summed in float32, in the dtype of W. W [out, in], A [r, in] and B [out, r] are matrices or
    stacks of matrices."""
    # The sum is computed in place in the copy: a stack of experts has gigabytes.
    total = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    add = total.addmm_ if weight.ndim == 2 else total.baddbmm_
    return add(b.float(), a.float(), alpha=scale).to(weight.dtype)
