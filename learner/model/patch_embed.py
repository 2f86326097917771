"""The vision tower's first layer, computed directly on uint8 patches of still images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cpu.distinct import distinct_rows
from kernels.cpu.linear import linear
from shared.vision import VisionSpec


class StillPatchEmbed(nn.Module):
    """A layer equal to normalising the pixels, repeating the image along time, and the tower's own convolution.

    The convolution's window is its stride, so it is one matrix product. All that is the same for every patch (mean,
    standard deviation, the sum over the repeated image) is folded into the weight. The parameters keep their names.
    """

    def __init__(self, proj: nn.Conv3d, spec: VisionSpec) -> None:
        super().__init__()
        self.proj = proj
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", 1.0 / (255.0 * torch.tensor(spec.std)), persistent=False)
        self.register_buffer("shift", torch.tensor(spec.mean) / torch.tensor(spec.std), persistent=False)
        self.compute_dtype = torch.float32

    def forward(self, patches: Tensor) -> Tensor:
        """Embed uint8 [P,3,patch,patch]: [P, hidden] in `compute_dtype`, computed in float32.

        On a CPU, equal patches are computed once.
        """
        weight = self.proj.weight.float().sum(2)  # [hidden, 3, patch, patch]
        bias = -(weight.sum((2, 3)) * self.shift).sum(1)
        if self.proj.bias is not None:
            bias = bias + self.proj.bias.float()
        weight = weight * self.scale[:, None, None]
        rows = patches.flatten(1)
        if (distinct := distinct_rows(rows)) is None:
            return linear(rows.float(), weight.flatten(1), bias).to(self.compute_dtype)
        first, like = distinct
        embedded = linear(rows[first].float(), weight.flatten(1), bias)
        return F.embedding(like, embedded).to(self.compute_dtype)
