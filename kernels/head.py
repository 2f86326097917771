"""A language-model head sharded by FSDP2: gathered once per step, its gradient reduced once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _is_sharded(weight: Tensor) -> TypeGuard[DTensor]:
    if type(weight) in (Tensor, torch.nn.Parameter):
        return False  # and the import, which takes a second, is not needed
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


class GatheredHead:
    """The whole weight of a sharded head, for all microbatches of one step.

    `full` is a leaf [V, H] that `linear_logprob` takes as its weight in every microbatch; `reduce()` then adds the
    sum over all ranks of its gradient to the sharded parameter's `.grad`. A plain tensor is its own `full`.
    Every rank must call both, also one without rows.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.full = weight
        if _is_sharded(weight):
            self.full = weight.full_tensor().detach().requires_grad_(weight.requires_grad)

    def reduce(self) -> None:
        """Reduce-scatter the gradient once (a collective), and release the gathered weight."""
        full, self.full = self.full, self.weight
        weight = self.weight
        if not _is_sharded(weight) or not weight.requires_grad:
            return
        from torch.distributed.tensor import DTensor, Partial

        grad = torch.zeros_like(full) if full.grad is None else full.grad
        mesh = weight.device_mesh
        partial = DTensor.from_local(grad, mesh, [Partial()] * mesh.ndim, run_check=False)
        shard = partial.redistribute(mesh, weight.placements).to(weight.dtype)
        weight.grad = shard if weight.grad is None else weight.grad + shard


def whole(weight: Tensor) -> Tensor:
    """The whole weight, differentiable: a sharded one is gathered here, its gradient summed over ranks in backward."""
    if _is_sharded(weight):
        from torch.distributed.tensor import Partial

        return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    return weight
