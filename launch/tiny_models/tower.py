"""Teaches the vision tower of a small Sokoban model to see before the language layers learn to read: pictures of random
tiles, and for each visual token which tiles it shows and where it stands, from linear heads that are thrown away.

Shape suffixes: B = pictures, C = cells of one picture, M = visual tokens of all pictures, K = cells of each token.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from envs.boards.render import render
from learner.model.policy import Policy
from learner.packing.documents import packing_of
from shared.vision import VisionSpec, patchify

SIDE, TILES = 6, 7


def tiles(rng: np.random.Generator, count: int, pixels: int, spec: VisionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Pictures as patches, uint8 [P,3,patch,patch], and the tiles of each visual token, int64 [M,K]."""
    codes_BC = rng.integers(0, TILES, (count, SIDE * SIDE))
    pictures = [np.asarray(render(bytes(c.tolist()), SIDE, SIDE, pixels).convert("RGB")) for c in codes_BC]
    cells = cells_a_side(pixels, spec)
    blocks = codes_BC.reshape(count, SIDE // cells, cells, SIDE // cells, cells).transpose(0, 1, 3, 2, 4)
    return np.concatenate([patchify(p, spec) for p in pictures]), blocks.reshape(-1, cells * cells)


def cells_a_side(pixels: int, spec: VisionSpec) -> int:
    """Of a visual token, which covers a square of cells."""
    return spec.patch_size * spec.merge_size // pixels


def teach_tower(policy: Policy, *, pixels: int, steps: int, batch: int = 32, lr: float = 2e-3, seed: int = 0) -> None:
    """Trains `policy.vlm.model.visual` alone, every output that the language layers get. `pixels`: of a cell's side."""
    visual, cells = policy.vlm.model.visual, cells_a_side(pixels, policy.spec)
    outputs, blocks = 1 + len(visual.config.deepstack_visual_indexes), SIDE // cells
    parts = (TILES,) * cells**2 + (blocks, blocks)
    heads = nn.ModuleList(nn.Linear(policy.vlm.config.text_config.hidden_size, sum(parts)) for _ in range(outputs))
    optimizer = torch.optim.AdamW([*visual.parameters(), *heads.parameters()], lr=lr, betas=(0.9, 0.98))
    rng, started = np.random.default_rng(seed), time.monotonic()
    places = torch.arange(blocks**2).repeat(batch)
    patches_a_side = SIDE * pixels // policy.spec.patch_size
    grids = torch.tensor([[1, patches_a_side, patches_a_side]]).repeat(batch, 1)
    packing = packing_of((patches_a_side**2,) * batch, causal=False)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps) ** 0.5
        patches, tiles_MK = tiles(rng, batch, pixels, policy.spec)
        vision = visual(torch.from_numpy(patches), grid_thw=grids, packing=packing)
        labels = (*torch.from_numpy(tiles_MK).unbind(1), places // blocks, places % blocks)
        seen = [vision.pooler_output, *vision.deepstack_features]
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
