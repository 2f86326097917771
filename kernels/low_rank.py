"""A weight with an adapter in it, as learner, engines and exports alike compute it: bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A of a matrix W [out, in] with A [r, in] and B [out, r], or of a stack of them, summed in float32, in
    the dtype of W."""
    # The sum is made in the copy: a stack of experts has gigabytes.
    whole = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    add = whole.addmm_ if weight.ndim == 2 else whole.baddbmm_
    return add(b.float(), a.float(), alpha=scale).to(weight.dtype)
