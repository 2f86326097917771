"""A weight with an adapter in it, as learner, engines and exports alike compute it: bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A of a matrix W [out, in] with A [r, in] and B [out, r], or of a stack of them, summed in float32, in
    the dtype of W."""
    add = torch.addmm if weight.ndim == 2 else torch.baddbmm
    return add(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)
