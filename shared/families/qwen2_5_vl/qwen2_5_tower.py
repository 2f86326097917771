"""The vision tower of Qwen2.5-VL: no learned positions and no deepstack; most blocks attend within windows.

A window is a square of visual tokens, smaller at the right and lower edges. Tokens are ordered window by window, with
windows of equal size next to each other; an image of any size has at most four sizes of windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.families.engine_tower import Tables, VisionTower, attend_all, rms_normed, rotated_heads
from shared.families.mrope import Grid

Windows = tuple[tuple[int, int], ...]
"""Neighbours of equal size as (how many, patches of each)."""


@dataclass(frozen=True, slots=True, eq=False)
class Qwen25Tables(Tables):
    """The tables of a grid. `order`: int64 [tokens], the visual tokens window by window; `back` is the inverse
    permutation. The angles are in the order of `order`."""

    order: Tensor
    back: Tensor
    windows: Windows


class Qwen25Tower(VisionTower[Qwen25Tables]):
    def _levels(self, patches: Tensor, tables: Qwen25Tables) -> list[Tensor]:
        visual = self.visual
        tokens = patches.unflatten(1, (-1, visual.spatial_merge_unit))
        hidden = tokens[:, tables.order].flatten(1, 2)
        for depth, block in enumerate(visual.blocks):
            normed = rms_normed(block.norm1, hidden)
            if depth in visual.fullatt_block_indexes:
                hidden = hidden + attend_all(block.attn, normed, tables)
            else:
                hidden = hidden + attend_windows(block.attn, normed, tables)
            hidden = hidden + block.mlp(rms_normed(block.norm2, hidden))
        merged = visual.merger(hidden)
        return [merged.view(len(patches), len(tables.order), -1)[:, tables.back]]

    def _build_tables(self, grid: Grid) -> Qwen25Tables:
        visual, device = self.visual, self._weight.device
        merge = visual.spatial_merge_size
        order, windows = windows_of(grid, merge, visual.window_size // (visual.patch_size * merge))
        token_order = torch.from_numpy(order).to(device)
        raster = self._raster(grid).unflatten(0, (-1, visual.spatial_merge_unit))
        angles = self._angles(raster[token_order].flatten(), grid)
        return Qwen25Tables(angles.cos(), angles.sin(), token_order, token_order.argsort(), windows)


def windows_of(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, Windows]:
    """Return (the visual tokens of a still image window by window, the windows). `side` is a window's side in visual
    tokens. Large windows come first, so that those of equal size are neighbours; transformers orders them row by row.
    """
    _, rows, columns = (size // merge for size in grid)
    tokens = np.arange(rows * columns).reshape(rows, columns)
    corners = [(top, left) for top in range(0, rows, side) for left in range(0, columns, side)]
    cut = [tokens[top : top + side, left : left + side] for top, left in corners]
    cut.sort(key=lambda window: window.size, reverse=True)
    runs = tuple((len(list(same)), size * merge**2) for size, same in groupby(window.size for window in cut))
    return np.concatenate([window.reshape(-1) for window in cut]), runs


def attend_windows(attention: Any, hidden: Tensor, tables: Qwen25Tables) -> Tensor:
    """Attend from each patch to the patches of its window: [B, P, hidden] -> [B, P, hidden]."""
    heads = rotated_heads(attention, hidden, tables)
    sizes = [count * length for count, length in tables.windows]
    outputs = []
    for (count, length), *qkv in zip(tables.windows, *(each.split(sizes, dim=2) for each in heads), strict=True):
        query, key, value = (_as_batch(each, count, length) for each in qkv)
        out = F.scaled_dot_product_attention(query, key, value, scale=attention.scaling)
        outputs.append(out.transpose(1, 2).reshape(len(hidden), count * length, -1))
    return attention.proj(torch.cat(outputs, dim=1))


def _as_batch(heads: Tensor, count: int, length: int) -> Tensor:
    """Compute [B, heads, count * length, D] -> [B * count, heads, length, D]: the attention kernels take at most four
    dimensions."""
    return heads.transpose(1, 2).unflatten(1, (count, length)).flatten(0, 1).transpose(1, 2)
