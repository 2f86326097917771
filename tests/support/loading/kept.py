"""Measures how much memory a forward keeps."""

from __future__ import annotations

from unittest.mock import patch

import torch

from kernels.cpu import library
from learner.batch.microbatch import Microbatch
from learner.model.policy import Policy


def kept_bytes(policy: Policy, batch: Microbatch, *, in_c: bool = False) -> int:
    """Return the bytes of distinct memory, without parameters, that the forward keeps for the backward. By default
    torch computes everything; with `in_c` the CPU's C kernels are used, which keep the same as a GPU's. The fused MLP,
    which keeps less, is disabled."""
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # a reference, so that its memory is not reused
        return tensor

    chosen = patch("kernels.cpu.library.library", library.library if in_c else lambda: None)
    in_parts = patch("kernels.cpu.mlp.supports_swiglu_mlp", lambda *_: False)
    with chosen, in_parts, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy.train()(batch, 1.0)
    del output
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)
