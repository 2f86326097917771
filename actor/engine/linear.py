"""Matrix products on CPUs by oneDNN instead of MKL, which is half as fast on AMD processors in float32.

oneDNN compiles a kernel for each new shape (about 0.5 ms), so callers keep the number of distinct row counts small:
see `padded`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias; inference only (no gradient)."""
    if _HAS_ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class FastLinear(nn.Linear):
    """`nn.Linear` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_fast_linear(model: nn.Module) -> None:
    """Turns every plain nn.Linear of the model into a FastLinear, sharing its parameters."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


def padded(rows: int) -> int:
    """The number of rows to compute instead of `rows`: a multiple of 8, above 64 of 32, above 512 of 128."""
    step = 8 if rows <= 64 else 32 if rows <= 512 else 128
    return -(-rows // step) * step
