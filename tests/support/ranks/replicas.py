"""Counts how often replicas add up their gradients, and computes the result, on four ranks, two of which share a copy:
OUT.

python -m tests.support.ranks.replicas MODEL OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from learner.batch.microbatch import Microbatch
from learner.distributed import barrier, close_ranks, init_ranks
from learner.model.sharding import add_up_replicas
from learner.training.trainer import Trainer
from learner.training.update import accumulate_gradient
from tests.support.episodes import random_groups
from tests.support.learner_ranks import gradients_of, trainer_of
from tests.support.ranks.processes import in_processes


def stepped(folder: str, trainer: Trainer) -> dict[str, Any]:
    """Return the gradient of one step, the number of its microbatches, and how many tensors of a copy were summed over
    the replicas."""
    found: dict[str, Any] = {"sums": 0, "groups": sum(isinstance(m, FSDPModule) for m in trainer.policy.modules())}
    group, all_reduce = trainer.ranks.mesh.get_group(0), dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found["sums"] += kwargs.get("group") is group
        return all_reduce(tensor, *args, **kwargs)

    groups = random_groups(trainer.policy.spec, 9, seed=3, turns=2)
    packed: list[Microbatch] = []

    def noted(batch: Microbatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        packed.append(batch)
        return accumulate_gradient(batch, *args, **kwargs)

    with patch("learner.training.update.accumulate_gradient", noted), patch.object(dist, "all_reduce", counted):
        (found["gradient"],) = gradients_of(trainer, [groups])
    return found | {"microbatches": len(packed)}


def compute(folder: str, out: Path) -> None:
    ranks = init_ranks("cpu", timeout_s=120)
    found = {"once": stepped(folder, trainer_of(folder, ranks, shard_size=2))}
    with patch(
        "learner.training.update.add_up_replicas", lambda policy, ranks, now: add_up_replicas(policy, ranks, now=True)
    ):
        found["always"] = stepped(folder, trainer_of(folder, ranks, shard_size=2))
    if ranks.is_main:
        torch.save(found, out)
    barrier(ranks, timeout_s=30)
    close_ranks()


if __name__ == "__main__":
    sys.exit(in_processes(((4,),), compute, sys.argv[1], Path(sys.argv[2])))
