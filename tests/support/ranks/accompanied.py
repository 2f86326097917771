"""What test_companions.py looks at: three ranks publish, of which two accompany rank 0, and one of these fails: OUT.

python -m tests.support.ranks.accompanied MODEL OUT ENGINE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from learner.distributed import barrier, close_ranks, init_ranks
from learner.weights.companions import Companion
from learner.weights.gathering import gathered_buckets
from learner.weights.publisher import Publisher, PublishSettings
from tests.support.publishing import move
from tests.support.ranks.processes import in_processes
from tests.support.ranks.sent import policy_of

RANKS, SENDERS = 4, 3
SETTINGS = PublishSettings(bucket_bytes=100_000, timeout_s=8.0, call_timeout_s=8.0, senders=SENDERS)


def compute(model: str, out: Path, engine: str) -> None:
    ranks = init_ranks("cpu", timeout_s=120)
    policy = policy_of(model, ranks, "float32", {}, {})
    received: list[int] = []
    real = Companion._receive

    async def noting(self: Any, body: dict[str, Any]) -> None:
        if len(received) == 4 * num_buckets and ranks.rank == SENDERS - 1:
            raise ValueError("as the test wants")
        received.append(len(body["names"]))
        await real(self, body)

    num_buckets = sum(1 for _ in gathered_buckets(policy, ranks, SETTINGS.bucket_bytes))
    found: list[dict[str, float]] = []
    with patch.object(Companion, "_receive", noting):
        publisher = Publisher(policy, ranks, SETTINGS)
        for version in range(6):
            move(policy, 0.01)
            found.append(publisher.publish(version, [engine]))
        barrier(ranks, timeout_s=30)
        publisher.close()
    everyone: list[Any] = [None] * ranks.size
    torch.distributed.all_gather_object(everyone, len(received))
    if ranks.is_main:
        one = {name: v.clone() for bucket in gathered_buckets(policy, ranks, 1 << 30) for name, v in bucket.values()}
        torch.save({"metrics": found, "received": everyone, "buckets": num_buckets, "weights": one}, out)
    else:
        list(gathered_buckets(policy, ranks, 1 << 30))
    barrier(ranks, timeout_s=30)
    close_ranks()


if __name__ == "__main__":
    sys.exit(in_processes(((RANKS,),), compute, sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
