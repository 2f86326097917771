"""Vision towers for the embedded engine, which compute images of equal size as one batch.

Suffixes: P = patches of one image, B = images of one grid, D = head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import layer as cpu_layer
from kernels.cpu.distinct import distinct_rows
from kernels.cpu.library import supports_layer
from kernels.cpu.linear import linear, padded
from shared.families.mrope import Grid

MAX_BATCH_PATCHES = 16384

TablesT = TypeVar("TablesT", bound="Tables")


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Tensors that depend only on a grid: at least cosine and sine of its patches' rotary angles, float32 [P, 1, 1,
    D]."""

    cos: Tensor
    sin: Tensor


class VisionTower(ABC, Generic[TablesT]):
    """Runs the modules of transformers' vision model on uint8 patches. Each kind of tower is a subclass."""

    def __init__(self, visual: Any, mean: Sequence[float], std: Sequence[float]) -> None:
        self.visual = visual
        self._mean, self._std = torch.tensor(mean), torch.tensor(std)
        self._tables: dict[Grid, TablesT] = {}
        self.weights_changed()

    @abstractmethod
    def _build_tables(self, grid: Grid) -> TablesT: ...

    @abstractmethod
    def _levels(self, patches: Tensor, tables: TablesT) -> list[Tensor]:
        """Compute embedded patches [B, P, hidden] -> the images' final embedding and each deepstack level, all images
        together."""

    def weights_changed(self) -> None:
        """Fold the pixel normalisation and the equal frames of a still image into one matrix; forget tables."""
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
        """Return for each image (uint8 [P, 3, patch, patch]) its embedding and each deepstack level, [tokens,
        hidden]."""
        by_grid: dict[Grid, list[int]] = defaultdict(list)
        for index, grid in enumerate(grids):
            by_grid[grid].append(index)
        features: dict[int, tuple[Tensor, ...]] = {}
        for grid, members in by_grid.items():
            for chunk in _chunks(members, max(1, MAX_BATCH_PATCHES // (grid[0] * grid[1] * grid[2]))):
                levels = self._forward(np.stack([patches[i] for i in chunk]), grid)
                for position, index in enumerate(chunk):
                    features[index] = tuple(level[position] for level in levels)
        return [features[index] for index in range(len(patches))]

    def _forward(self, patches: np.ndarray, grid: Grid) -> list[Tensor]:
        """Compute uint8 [B, P, 3, patch, patch] -> embedding and deepstack levels, each [B, tokens, hidden]."""
        batch, num_patches = patches.shape[:2]
        embedded = self._embed(torch.from_numpy(patches).view(batch * num_patches, -1)).unflatten(0, (batch, -1))
        return [level.view(batch, -1, level.shape[-1]) for level in self._levels(embedded, self._grid_tables(grid))]

    def _embed(self, pixels: Tensor) -> Tensor:
        """Embed patches uint8 [N, 3 * patch * patch] -> [N, hidden]; on a CPU equal patches are computed once."""
        pixels = pixels.to(self._weight.device)
        if (distinct := distinct_rows(pixels)) is None:
            return linear(pixels.to(self._weight.dtype), self._weight, self._bias)
        first, like = distinct
        # Padded, so that few different row counts occur.
        rows = pixels[F.pad(first, (0, padded(len(first)) - len(first)))]
        return F.embedding(like, linear(rows.to(self._weight.dtype), self._weight, self._bias))

    def _grid_tables(self, grid: Grid) -> TablesT:
        tables = self._tables.get(grid)
        if tables is None:
            if len(self._tables) >= 256:
                self._tables.clear()
            tables = self._tables[grid] = self._build_tables(grid)
        return tables

    def _raster(self, grid: Grid) -> Tensor:
        """Return int64 [rows * columns]: for each patch of a frame, in the tower's order, its index in the image's
        raster. In that order the patches of one merge block are neighbours."""
        _, rows, columns = grid
        merge = self.visual.spatial_merge_size
        raster = torch.arange(rows * columns, device=self._weight.device)
        return raster.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()

    def _angles(self, order: Tensor, grid: Grid) -> Tensor:
        """Return float32 [P, 1, 1, D]: the rotary angles of the patches at the indices `order` of a frame's raster, for
        every frame."""
        frames, _, columns = grid
        position = torch.stack((order // columns, order % columns), dim=1).repeat(frames, 1)
        frequencies = self.visual.rotary_pos_emb.inv_freq.to(order.device).float()
        angles = (position[:, :, None] * frequencies).flatten(1)
        return torch.cat((angles, angles), dim=1)[:, None, None]


def rotated_heads(attention: Any, hidden: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of `hidden` [B, P, hidden], each [B, heads, P, D]. Queries and keys are rotated
    by the patches' positions."""
    batch, num_patches, _ = hidden.shape
    qkv = attention.qkv(hidden).view(batch, num_patches, 3, attention.num_heads, -1)
    qk = qkv[:, :, :2].float()
    half = qk.shape[-1] // 2
    rotated = torch.cat((-qk[..., half:], qk[..., :half]), dim=-1)
    query, key = (qk * tables.cos + rotated * tables.sin).to(qkv.dtype).transpose(1, 3).unbind(2)
    return query, key, qkv[:, :, 2].transpose(1, 2)


def attend_all(attention: Any, hidden: Tensor, tables: Tables) -> Tensor:
    """Attend from each patch to all patches of its image: [B, P, hidden] -> [B, P, hidden]."""
    if supports_layer(hidden, 1, 1, hidden.shape[-1] // attention.num_heads):
        heads = attention.qkv(hidden).view(*hidden.shape[:2], 3 * attention.num_heads, -1)
        cpu_layer.rotate_heads(heads, 2 * attention.num_heads, (tables.cos, tables.sin))
        return attention.proj(torch.stack([cpu_layer.attend_all(image, attention.scaling) for image in heads]))
    out = F.scaled_dot_product_attention(*rotated_heads(attention, hidden, tables), scale=attention.scaling)
    return attention.proj(out.transpose(1, 2).reshape(hidden.shape))


def rms_normed(norm: Any, hidden: Tensor) -> Tensor:
    """Compute an RMS norm with torch's own kernel."""
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def _chunks(members: list[int], most: int) -> Iterator[list[int]]:
    """Yield pieces of the list whose lengths are powers of two, at most `most`: so few shapes occur, without
    padding."""
    at = 0
    while at < len(members):
        size = 1 << (min(len(members) - at, most, 32).bit_length() - 1)
        yield members[at : at + size]
        at += size
