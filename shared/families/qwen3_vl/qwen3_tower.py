"""The vision tower of Qwen3-VL, Qwen3-VL-MoE and Qwen3.5: learned positions, attention to the whole image, and
deepstack levels unless the family has none."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from shared.families.engine_tower import Tables, VisionTower, attend_all
from shared.families.mrope import Grid


@dataclass(frozen=True, slots=True, eq=False)
class Qwen3Tables(Tables):
    """The tables of a grid. `positions`: the learned embedding, resampled to the grid, [P, hidden]."""

    positions: Tensor


class Qwen3Tower(VisionTower[Qwen3Tables]):
    def _levels(self, patches: Tensor, tables: Qwen3Tables) -> list[Tensor]:
        visual = self.visual
        levels = getattr(visual, "deepstack_visual_indexes", ())
        hidden, deepstack = patches + tables.positions, []
        for depth, block in enumerate(visual.blocks):
            hidden = hidden + attend_all(block.attn, block.norm1(hidden), tables)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if depth in levels:
                deepstack.append(visual.deepstack_merger_list[levels.index(depth)](hidden))
        return [visual.merger(hidden), *deepstack]

    def _build_tables(self, grid: Grid) -> Qwen3Tables:
        frames, rows, columns = grid
        side, order = self.visual.num_grid_per_side, self._raster(grid)
        learned = self.visual.pos_embed.weight.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resampled = F.interpolate(learned, size=(rows, columns), mode="bilinear", align_corners=True)
        positions = resampled[0].flatten(1).T[order].repeat(frames, 1).to(self._weight.dtype)
        angles = self._angles(order, grid)
        return Qwen3Tables(angles.cos(), angles.sin(), positions)
