"""Trains the vision tower of a small model before the language layers: on pictures of random tiles, temporary linear
heads predict, for each visual token, which tiles it shows and its position.

Shape suffixes: B = pictures, C = cells of one picture, M = visual tokens of all pictures, K = cells of each token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from envs.boards.tile_sets import Codes, TileSet
from learner.batch.packing import packing_of
from learner.model.policy import Policy
from shared.vision import VisionSpec, patchify


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of random tiles of a set, in `rows` and `columns`."""

    tiles: TileSet
    rows: int
    columns: int


def tiles(
    rng: np.random.Generator, shown: Pictures, count: int, pixels: int, spec: VisionSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Return random pictures as patches, uint8 [P,3,patch,patch], and the tiles of each visual token, int64 [M,K]."""
    rows, columns, tile_set = shown.rows, shown.columns, shown.tiles
    codes_BC = rng.integers(0, len(tile_set.symbols), (count, rows * columns))
    boards = [Codes(rows, columns, bytes(c.tolist())) for c in codes_BC]
    pictures = [np.asarray(tile_set.render(board, pixels).convert("RGB")) for board in boards]
    cells = cells_a_side(pixels, spec)
    blocks = codes_BC.reshape(count, rows // cells, cells, columns // cells, cells).transpose(0, 1, 3, 2, 4)
    return np.concatenate([patchify(p, spec) for p in pictures]), blocks.reshape(-1, cells * cells)


def cells_a_side(pixels: int, spec: VisionSpec) -> int:
    """Return the side, in cells, of the square of cells that a visual token covers."""
    return spec.patch_size * spec.merge_size // pixels


def teach_tower(
    policy: Policy,
    pictures: Sequence[Pictures],
    *,
    pixels: int,
    steps: int,
    batch: int = 32,
    lr: float = 2e-3,
    seed: int = 0,
) -> None:
    """Train only `policy.tower`, on all its outputs to the language layers; the steps take the kinds of `pictures` in
    turn. `pixels`: side of a cell."""
    visual, cells = policy.tower, cells_a_side(pixels, policy.spec)
    outputs = 1 + len(getattr(visual.config, "deepstack_visual_indexes", ()))
    first_tiles = np.cumsum([0, *(len(shown.tiles.symbols) for shown in pictures)])
    sides = [max(shown.rows for shown in pictures) // cells, max(shown.columns for shown in pictures) // cells]
    parts = (int(first_tiles[-1]),) * cells**2 + tuple(sides)
    heads = nn.ModuleList(nn.Linear(policy.vlm.config.text_config.hidden_size, sum(parts)) for _ in range(outputs))
    optimizer = torch.optim.AdamW([*visual.parameters(), *heads.parameters()], lr=lr, betas=(0.9, 0.98))
    rng, started = np.random.default_rng(seed), time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps) ** 0.5
        shown, first_tile = pictures[step % len(pictures)], int(first_tiles[step % len(pictures)])
        patches, tiles_MK = tiles(rng, shown, batch, pixels, policy.spec)
        rows, columns = (side * pixels // policy.spec.patch_size for side in (shown.rows, shown.columns))
        grids = torch.tensor([[1, rows, columns]]).repeat(batch, 1)
        packing = packing_of((rows * columns,) * batch, causal=False)
        vision = visual(torch.from_numpy(patches), grid_thw=grids, packing=packing)
        places = torch.arange(shown.rows * shown.columns // cells**2).repeat(batch)
        width = shown.columns // cells
        labels = (*torch.from_numpy(tiles_MK + first_tile).unbind(1), places // width, places % width)
        seen = [vision.pooler_output, *(getattr(vision, "deepstack_features", None) or ())]
        losses = [_loss(head(found).split(parts, dim=1), labels) for head, found in zip(heads, seen, strict=True)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*visual.parameters(), *heads.parameters()], 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            minutes = (time.monotonic() - started) / 60
            print(f"tower step {step + 1}/{steps}  loss {loss.item():.4f}  {minutes:.1f} min", flush=True)


def _loss(logits: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([cross_entropy(part, label) for part, label in zip(logits, labels, strict=True)]).sum()
