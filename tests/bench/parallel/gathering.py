"""Gathering a publication's buckets from ranks: bytes, collectives and processor seconds, as it is and as it was.

    python -m tests.bench.parallel.gathering [--ranks N] [--rounds N] [--model NAME] [--shrink N]

The parameters are those of `tests.bench.parallel.publish_many`, in float32 shards as training has them. `whole`: each
parameter gathered as it is on every rank, then cast and laid out there; `rows`: `learner.weights.gathering`. Each
round takes one, then the other, and all ranks begin together. Seconds are those of a gathering, processor seconds of
all ranks together, medians of the rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from learner.distributed import Ranks, close_ranks, init_ranks
from learner.weights.gathering import buckets, gathered, gathered_buckets
from tests.bench.parallel.publish_many import BUCKET_BYTES, weights
from tests.support.ranks.processes import in_processes
from tests.support.ranks.sent import counted


def policy_of(model: str, shrink: int, ranks: Ranks) -> Any:
    """Its parameters, float32, cut by their rows."""
    made = weights(model, shrink)
    cut = {name: distribute_tensor(values, ranks.mesh, [Shard(0)], src_data_rank=None) for name, values in made}
    vlm = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl_moe"))
    return SimpleNamespace(named_weights=lambda: iter(cut.items()), vlm=vlm, dtype=torch.bfloat16, adapters=None)


def measured(walk: Callable[[], Any]) -> tuple[float, float, int]:
    """(processor seconds of this process, seconds, most bytes of a bucket that is held here)."""
    dist.barrier()
    begun, begun_cpu, most = time.monotonic(), time.process_time(), 0
    for bucket in walk():
        most = max(most, 0 if bucket is None else bucket.flat.numel())
    return time.process_time() - begun_cpu, time.monotonic() - begun, most


def compute(arguments: argparse.Namespace) -> None:
    ranks = init_ranks("cpu", timeout_s=300)
    torch.set_num_threads(1)
    policy, most_bytes = policy_of(arguments.model, arguments.shrink, ranks), BUCKET_BYTES // arguments.shrink**2
    real, sizes = DTensor.full_tensor, list[int]()

    def noting(tensor: DTensor) -> Any:
        sizes.append(tensor.to_local().nbytes * ranks.size)
        return real(tensor)

    ways: dict[str, Callable[[], Any]] = {
        "whole": lambda: buckets(gathered(policy), policy.dtype, most_bytes),
        "rows": lambda: gathered_buckets(policy, ranks, most_bytes),
    }
    found: dict[str, Any] = {"ranks": ranks.size, "model": arguments.model, "shrink": arguments.shrink}
    found["bytes"] = sum(2 * p.numel() for _, p in policy.named_weights())
    rounds = [[measured(walk) for walk in ways.values()] for _ in range(arguments.rounds + 1)][1:]
    rows = dict(zip(ways, zip(*rounds, strict=True), strict=True))
    with counted() as gathered_sizes, patch.object(DTensor, "full_tensor", noting):
        for walk in ways.values():
            list(walk())
    found["whole"] = {"gathered_bytes": sum(sizes), "collectives": len(sizes)}
    found["rows"] = {"gathered_bytes": sum(gathered_sizes), "collectives": len(gathered_sizes)}
    for way, measurements in rows.items():
        own = torch.tensor(measurements, dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(ranks.size)]
        dist.all_gather(every, own)
        cpu, wall, held = torch.stack(every).unbind(-1)
        found[way]["cpu_s"] = round(statistics.median(cpu.sum(0).tolist()), 4)
        found[way]["wall_s"] = round(statistics.median(wall[0].tolist()), 4)
        found[way]["held_by_others"] = int(held[1:].max())
    if ranks.is_main:
        print(json.dumps(found))
    close_ranks()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="Qwen3-VL-30B-A3B")
    parser.add_argument("--shrink", type=int, default=32)
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2:
        print(f"--ranks is {arguments.ranks}: a single rank has nothing to gather; give at least 2", file=sys.stderr)
        return 2
    if arguments.rounds < 1:
        print(f"--rounds is {arguments.rounds}: nothing would be measured; give at least 1", file=sys.stderr)
        return 2
    return in_processes(((arguments.ranks,),), compute, arguments)


if __name__ == "__main__":
    sys.exit(main())
