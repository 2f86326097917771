"""The vision tower of GLM-4.1V and GLM-4.6V-Flash: learned positions, resampled bicubically at the patches' centres,
attention to the whole image, and a convolution that joins patches before the merger."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.linear import linear
from shared.families.engine_tower import Tables, VisionTower, attend_all, rms_normed
from shared.families.mrope import Grid


@dataclass(frozen=True, slots=True, eq=False)
class Glm4vTables(Tables):
    """The tables of a grid. `positions`: the learned embedding, resampled to the grid, [P, hidden]."""

    positions: Tensor


class Glm4vTower(VisionTower[Glm4vTables]):
    def weights_changed(self) -> None:
        """Fold as every tower does, and lay the convolution out as a matrix over the patches of a visual token."""
        super().weights_changed()
        self._joining = self.visual.downsample.weight.detach().permute(0, 2, 3, 1).flatten(1)

    def _levels(self, patches: Tensor, tables: Glm4vTables) -> list[Tensor]:
        visual = self.visual
        hidden = rms_normed(visual.post_conv_layernorm, patches) + tables.positions
        for block in visual.blocks:
            hidden = hidden + attend_all(block.attn, rms_normed(block.norm1, hidden), tables)
            hidden = hidden + block.mlp(rms_normed(block.norm2, hidden))
        merged = rms_normed(visual.post_layernorm, hidden).unflatten(1, (-1, visual.spatial_merge_size**2)).flatten(2)
        return [visual.merger(linear(merged.flatten(0, 1), self._joining, visual.downsample.bias))]

    def _build_tables(self, grid: Grid) -> Glm4vTables:
        frames, rows, columns = grid
        learned = self.visual.embeddings.position_embedding.weight.float()
        side, order = self.visual.embeddings.num_positions**0.5, self._raster(grid)
        centres = torch.stack(((order % columns + 0.5) / columns, (order // columns + 0.5) / rows), dim=-1) * 2 - 1
        image = learned.view(1, int(side), int(side), -1).permute(0, 3, 1, 2)
        found = F.grid_sample(image, centres[None, :, None], mode="bicubic", align_corners=False, padding_mode="border")
        angles = self._angles(order, grid)
        positions = found[0, :, :, 0].T.repeat(frames, 1).to(self._weight.dtype)
        return Glm4vTables(angles.cos(), angles.sin(), positions)
