"""Teaches the vision tower of a small Sokoban model to see before the language layers learn to read: pictures of random
tiles, and for each visual token which tile it is and where it stands, from linear heads that are thrown away.

Shape suffixes: B = pictures, C = cells of one picture, M = B * C visual tokens (one a cell), H = hidden size.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from envs.boards.render import render
from learner.model.attention import packing_of
from learner.model.policy import Policy
from shared.vision import VisionSpec, patchify

SIDE, TILES, PIXELS = 6, 7, 32


def tiles(rng: np.random.Generator, count: int, spec: VisionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Pictures as patches, uint8 [P,3,patch,patch], and the tiles they show, int64 [B,C]."""
    codes_BC = rng.integers(0, TILES, (count, SIDE * SIDE))
    pictures = [np.asarray(render(bytes(c.tolist()), SIDE, SIDE, PIXELS).convert("RGB")) for c in codes_BC]
    return np.concatenate([patchify(p, spec) for p in pictures]), codes_BC


def teach_tower(policy: Policy, *, steps: int, batch: int = 32, lr: float = 2e-3, seed: int = 0) -> None:
    """Trains `policy.vlm.model.visual` alone, every output that the language layers get."""
    visual = policy.vlm.model.visual
    outputs = 1 + len(visual.config.deepstack_visual_indexes)
    heads = nn.ModuleList(
        nn.Linear(policy.vlm.config.text_config.hidden_size, TILES + 2 * SIDE) for _ in range(outputs)
    )
    optimizer = torch.optim.AdamW([*visual.parameters(), *heads.parameters()], lr=lr, betas=(0.9, 0.98))
    rng, started = np.random.default_rng(seed), time.monotonic()
    cells = torch.arange(SIDE * SIDE).repeat(batch)
    grids = torch.tensor([[1, 2 * SIDE, 2 * SIDE]]).repeat(batch, 1)
    packing = packing_of((4 * SIDE * SIDE,) * batch, causal=False, device=torch.device("cpu"))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps) ** 0.5
        patches, codes_BC = tiles(rng, batch, policy.spec)
        vision = visual(torch.from_numpy(patches), grid_thw=grids, packing=packing)
        labels = (torch.from_numpy(codes_BC).flatten(), cells // SIDE, cells % SIDE)
        seen = [vision.pooler_output, *vision.deepstack_features]
        losses = [_loss(head(features_MH), labels) for head, features_MH in zip(heads, seen, strict=True)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*visual.parameters(), *heads.parameters()], 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            minutes = (time.monotonic() - started) / 60
            print(f"tower step {step + 1}/{steps}  loss {loss.item():.4f}  {minutes:.1f} min", flush=True)


def _loss(logits_MK: Tensor, labels: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    parts = logits_MK.split((TILES, SIDE, SIDE), dim=1)
    return sum(
        (cross_entropy(part, label) for part, label in zip(parts, labels, strict=True)), start=logits_MK.new_zeros(())
    )
