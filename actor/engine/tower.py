"""The vision tower of the embedded engine: images of equal size are computed as one batch.

Suffixes: P = patches of one image, B = images of one grid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu_linear import linear
from shared.vision import Grid, VisionSpec

MAX_BATCH_PATCHES = 16384


@dataclass(frozen=True, slots=True, eq=False)
class _GridTables:
    """What depends on a grid and the weights: position embeddings [P, hidden], rotary angles [P, 1, 1, head]."""

    positions: Tensor
    cos: Tensor
    sin: Tensor


class VisionTower:
    """Runs the modules of a Qwen3-VL vision model on uint8 patches."""

    def __init__(self, visual: Any, spec: VisionSpec) -> None:
        self.visual = visual
        self._mean, self._std = torch.tensor(spec.mean), torch.tensor(spec.std)
        self._tables: dict[Grid, _GridTables] = {}
        self.weights_changed()

    def weights_changed(self) -> None:
        """Folds the pixel normalisation and the equal frames of a still image into one matrix; forgets tables."""
        self._tables.clear()
        proj = self.visual.patch_embed.proj
        with torch.no_grad():
            weight = proj.weight.float().sum(dim=2)  # [out, 3, patch, patch]
            scale = (1 / (255 * self._std)).to(weight.device)[None, :, None, None]
            shift = (self._mean / self._std).to(weight.device)[None, :, None, None]
            bias = 0.0 if proj.bias is None else proj.bias.float()
            self._bias = (bias - (weight * shift).sum(dim=(1, 2, 3))).to(proj.weight.dtype)
            self._weight = (weight * scale).flatten(1).to(proj.weight.dtype)

    def encode(self, patches: Sequence[np.ndarray], grids: Sequence[Grid]) -> list[tuple[Tensor, ...]]:
        """Per image (uint8 [P, 3, patch, patch]): its embedding and each deepstack level, [tokens, hidden]."""
        by_grid: dict[Grid, list[int]] = defaultdict(list)
        for index, grid in enumerate(grids):
            by_grid[grid].append(index)
        features: dict[int, tuple[Tensor, ...]] = {}
        for grid, members in by_grid.items():
            for chunk in _chunks(members, max(1, MAX_BATCH_PATCHES // (grid[0] * grid[1] * grid[2]))):
                levels = self._forward(np.stack([patches[i] for i in chunk]), grid)
                for place, index in enumerate(chunk):
                    features[index] = tuple(level[place] for level in levels)
        return [features[index] for index in range(len(patches))]

    def _forward(self, patches: np.ndarray, grid: Grid) -> list[Tensor]:
        """uint8 [B, P, 3, patch, patch] -> embedding and deepstack levels, each [B, tokens, hidden]."""
        visual, tables = self.visual, self._grid_tables(grid)
        batch, num_patches = patches.shape[:2]
        pixels = torch.from_numpy(patches).to(self._weight.device).to(self._weight.dtype)
        hidden = linear(pixels.view(batch, num_patches, -1), self._weight, self._bias) + tables.positions
        deepstack = []
        for depth, block in enumerate(visual.blocks):
            hidden = hidden + self._attention(block.attn, block.norm1(hidden), tables)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if depth in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(depth)]
                deepstack.append(merger(hidden))
        levels = [visual.merger(hidden), *deepstack]
        return [level.view(batch, -1, level.shape[-1]) for level in levels]

    def _attention(self, attention: Any, hidden: Tensor, tables: _GridTables) -> Tensor:
        batch, num_patches, width = hidden.shape
        qkv = attention.qkv(hidden).view(batch, num_patches, 3, attention.num_heads, -1)
        qk = qkv[:, :, :2].float()
        half = qk.shape[-1] // 2
        turned = torch.cat((-qk[..., half:], qk[..., :half]), dim=-1)
        query, key = (qk * tables.cos + turned * tables.sin).to(qkv.dtype).transpose(1, 3).unbind(2)
        value = qkv[:, :, 2].transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, scale=attention.scaling)
        return attention.proj(out.transpose(1, 2).reshape(batch, num_patches, width))

    def _grid_tables(self, grid: Grid) -> _GridTables:
        tables = self._tables.get(grid)
        if tables is None:
            if len(self._tables) >= 256:
                self._tables.clear()
            tables = self._tables[grid] = self._build_tables(grid)
        return tables

    def _build_tables(self, grid: Grid) -> _GridTables:
        visual, device = self.visual, self._weight.device
        frames, rows, columns = grid
        merge = visual.spatial_merge_size
        raster = torch.arange(rows * columns, device=device).view(rows // merge, merge, columns // merge, merge)
        order = raster.transpose(1, 2).flatten()  # patches of one merge block follow each other
        side = visual.num_grid_per_side
        learned = visual.pos_embed.weight.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resampled = F.interpolate(learned, size=(rows, columns), mode="bilinear", align_corners=True)
        positions = resampled[0].flatten(1).T[order].repeat(frames, 1).to(self._weight.dtype)
        place = torch.stack((order // columns, order % columns), dim=1).repeat(frames, 1)
        angles = (place[:, :, None] * visual.rotary_pos_emb.inv_freq.to(device).float()).flatten(1)
        angles = torch.cat((angles, angles), dim=1)[:, None, None]
        return _GridTables(positions, angles.cos(), angles.sin())


def _chunks(members: list[int], most: int) -> Iterator[list[int]]:
    """Cuts the list into pieces whose lengths are powers of two, at most `most`: few shapes, nothing padded."""
    at = 0
    while at < len(members):
        size = 1 << (min(len(members) - at, most, 32).bit_length() - 1)
        yield members[at : at + size]
        at += size
