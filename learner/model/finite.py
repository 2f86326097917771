"""A check that keeps weights with NaN or infinite values from engines and checkpoints: a run then continues from its
last good checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from learner.distributed import Ranks, all_max, own_part
from learner.model.policy import Policy


def check_finite(named: Iterable[tuple[str, Tensor]], ranks: Ranks, dtype: torch.dtype = torch.float32) -> None:
    """Raise ValueError, on every rank, if any rank's part of a tensor holds a value that is not a finite number of
    `dtype`.

    The rank with that part names the tensor. A collective; each rank reads its own part once.
    """
    local = [(name, own_part(t)) for name, t in named]
    local = [(name, t.detach()) for name, t in local if t.numel()]
    largest = torch._foreach_norm([t for _, t in local], math.inf) if local else []
    limit = torch.finfo(dtype).max
    sound = torch.stack([value.float().to(ranks.device) <= limit for value in largest]) if local else torch.ones(0)
    own = next((name for (name, _), good in zip(local, sound.tolist(), strict=True) if not good), "")
    if all_max(torch.tensor([bool(own)], dtype=torch.int32, device=ranks.device), ranks).item():
        raise ValueError(
            f"the weights hold what is no finite number of {str(dtype).removeprefix('torch.')} "
            f"({own or 'another rank names where'}): they are neither published nor saved; go on from the last "
            "checkpoint with --learner.resume auto, with a lower --learner.optimizer.lr if it happens again"
        )


def all_of_training(policy: Policy, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and each tensor that the optimizer stores for it, with names."""
    for name, parameter in policy.named_parameters():
        yield name, parameter
        for kind, kept in optimizer.state.get(parameter, {}).items():
            if isinstance(kept, Tensor):
                yield f"{kind} of {name}", kept
