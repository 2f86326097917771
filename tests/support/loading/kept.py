"""How much a forward keeps."""

from __future__ import annotations

from unittest.mock import patch

import torch

from kernels.cpu import library
from learner.batch import Microbatch
from learner.model.policy import Policy


def kept_bytes(policy: Policy, batch: Microbatch, *, in_c: bool = False) -> int:
    """Distinct memory that the forward keeps for the backward, parameters left out: where torch computes everything, or
    with what a CPU has in C, which keeps what a GPU's kernels keep. MLPs in one piece keep less, and are left out."""
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that its place is not used again
        return tensor

    chosen = patch("kernels.cpu.library.library", library.library if in_c else lambda: None)
    in_parts = patch("kernels.cpu.mlp.fits", lambda *_: False)
    with chosen, in_parts, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy.train()(batch, 1.0)
    del output
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)
