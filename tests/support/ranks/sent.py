"""Computes the results that test_gathering.py compares: the weights that rank 0 would send of a model that is sharded
in different ways: OUT/1.pt to 4.pt.

python -m tests.support.ranks.sent MODEL OUT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from learner.distributed import Ranks, barrier, close_ranks, init_ranks
from learner.model.policy import Policy
from learner.setup import build_policy
from learner.weights import gathering
from learner.weights.gathering import (
    Gathering,
    PublishedTensor,
    SourceTensor,
    buckets,
    changing,
    gathered,
    gathered_buckets,
)
from tests.support.episodes import learner_config
from tests.support.learner_ranks import model_of, ranks_for
from tests.support.ranks.processes import in_processes
from tests.support.small.adapted import adapted_config, move_adapters, recipe_of

LORA = {"targets": ("attention", "dense")}
MOST_BYTES = 60_000
MODES: dict[str, tuple[tuple[int, ...], str, dict[str, Any], dict[str, Any]]] = {  # numbers of ranks, case, settings
    "dense": ((1, 2, 3, 4), "dense", {}, {}),
    "windows": ((1, 4), "windows", {}, {}),
    "experts": ((1, 2, 4), "experts", {}, {}),
    "offloaded": ((2,), "dense", {"offload": True}, {}),
    "replicas": ((4,), "dense", {"shard_size": 2}, {}),
    "dealt": ((2, 4), "experts", {"expert": 2}, {}),
    "dealt, replicas": ((4,), "experts", {"expert": 2, "shard_size": 2}, {}),
    "adapters": ((1, 2), "dense", {}, LORA),
    "adapters of experts": ((1, 2), "experts", {}, {"targets": ("attention", "experts")}),
    "to all": ((2,), "dense", {}, {}),
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that gets, for each gathering collective, the total bytes of all ranks."""
    sizes: list[int] = []

    def noting(real: Any, sent: int) -> Any:
        def call(*arguments: Any, group: Any = None, **more: Any) -> Any:
            sizes.append(arguments[sent].nbytes * dist.get_world_size(group))
            return real(*arguments, group=group, **more)

        return call

    with (
        patch.object(dist, "gather", noting(dist.gather, 0)),
        patch.object(gathering, "all_gather", noting(gathering.all_gather, 1)),
    ):
        yield sizes


def policy_of(model: str, ranks: Ranks, dtype: str, changes: dict[str, Any], lora: dict[str, Any]) -> Policy:
    config = adapted_config(lora=lora, **changes) if lora else learner_config(**changes)
    recipe = recipe_of(model, config)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    policy = build_policy(recipe, ranks)
    if lora:
        move_adapters(policy, 0.05)
    return policy


def sent(policy: Policy, ranks: Ranks) -> dict[str, Any]:
    """Return the tensors that rank 0 sends, the sizes of the collectives, and whether the buckets equal those of whole
    parameters."""
    found: dict[str, Tensor] = {}
    with counted() as sizes:
        every = list(gathered_buckets(policy, ranks, MOST_BYTES))
    for bucket in every if ranks.is_main else ():
        assert bucket is not None and (bucket.flat.numel() <= MOST_BYTES or len(bucket.names) == 1)
        shapes = dict(zip(bucket.names, bucket.shapes, strict=True))
        found |= {name: values.view(shapes[name]).clone() for name, values in bucket.values()}
    assert ranks.is_main or every == [None] * len(every)
    # Gathered whole on every rank, then cast.
    plain = buckets(gathered(policy, changing(policy)), policy.dtype, MOST_BYTES)
    same = [
        ours is None
        or (
            (ours.names, ours.dtypes, ours.shapes, ours.last) == (b.names, b.dtypes, b.shapes, b.last)
            and torch.equal(ours.flat, b.flat)
        )
        for ours, b in zip(every, plain, strict=True)
    ]
    return {"sent": found, "gathered": sizes, "buckets": len(every), "as whole parameters": all(same)}


def of_two_dtypes(ranks: Ranks) -> list[tuple[str, Tensor]]:
    """Return the values in a bucket whose first tensor ends at an address where no float32 may begin; empty on other
    ranks than 0."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    tensors = {"odd": torch.arange(6.0).to(torch.bfloat16), "float32": torch.arange(10.0, 14.0)}
    items = [
        PublishedTensor(name, t.dtype, (SourceTensor(distribute_tensor(t, mesh, [Shard(0)]), t.dtype),))
        for name, t in tensors.items()
    ]
    bucket = Gathering(ranks).bucket(items, last=True)
    return [] if bucket is None else [(name, values.clone()) for name, values in bucket.values()]


def compute(model: str, out: Path) -> None:
    ranks = init_ranks("cpu", timeout_s=120)
    result: dict[str, Any] = {}
    for name, (sizes, case, changes, lora) in MODES.items():
        for dtype in ("float32", "bfloat16") if ranks.size in sizes else ():
            of_mode = ranks_for(ranks, learner_config(**changes).parallel)
            policy = policy_of(model_of(model, case), of_mode, dtype, changes, lora)
            with patch.object(gathering, "on_gpus_of_several_hosts", lambda _, to_all=name == "to all": to_all):
                result[f"{name}, {dtype}"] = sent(policy, of_mode)
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, {name: len(found["gathered"]) for name, found in result.items()})
    result["collectives of ranks"] = everyone
    if ranks.size == 2:
        result["two dtypes"] = of_two_dtypes(ranks)
    if ranks.is_main:
        torch.save(result, out / f"{ranks.size}.pt")
    barrier(ranks, timeout_s=60)
    close_ranks()


if __name__ == "__main__":
    sys.exit(in_processes(((1, 2), (3,), (4,)), compute, sys.argv[1], Path(sys.argv[2])))
