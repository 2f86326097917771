"""Muon (Jordan et al., 2024) for whole matrices, however they are sharded, and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon

MOMENTUM = 0.95


class MuonAdamW(AdamW):
    """AdamW, but parameters of groups with `muon` set, which are matrices, move by torch's Muon with Nesterov momentum.

    Steps have the size of AdamW's (Liu et al., 2025, "Muon is scalable for LLM training", equation 4), so that one
    learning rate and weight decay fit both. Orthogonalisation mixes all of a matrix: a sharded one is gathered for it,
    one at a time, on every rank. `step` uses up the gradients of such groups. A matrix's state is sharded as it is.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"] if group["muon"] else ():
                if p.grad is not None:
                    self._move(p, float(group["lr"]), group["weight_decay"])
                    p.grad = None  # nothing is left for AdamW
        return super().step(closure)

    def _move(self, p: Tensor, lr: float, weight_decay: float) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())  # AdamW looks for it in every state that it loads
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(p.grad, 1 - MOMENTUM)
        direction = orthogonal(p.grad.lerp(momentum, MOMENTUM))
        p.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)


def orthogonal(update: Tensor) -> Tensor:
    """What torch's Muon makes of a matrix: 0.2 sqrt(longer side) times its nearest orthogonal one, nearly; a DTensor
    of a DTensor."""
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    moved = nn.Parameter(torch.zeros_like(whole))
    moved.grad = whole
    Muon([moved], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    result = moved.detach().neg_()
    if isinstance(update, DTensor):  # every rank has the whole: nothing travels
        return distribute_tensor(result, update.device_mesh, update.placements, src_data_rank=None)
    return result
