"""What the updates of one step share and add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from learner.advantages import Scaling
from learner.batch import Episode
from learner.distributed import Ranks, all_sum
from learner.metrics.balance import Load, balance
from learner.metrics.throughput import Clock, speed
from learner.metrics.tokens import TokenStats
from learner.recording.columns import Watched
from shared.types import PolicyVersion


@dataclass(slots=True)
class Work:
    """What one step's updates share, and what they add up."""

    version: PolicyVersion  # of the policy as the step begins
    scaling: Scaling  # of the critic's advantages, and of the policy's learning rate
    clock: Clock
    stats: TokenStats
    loads: list[Load] = field(default_factory=list)  # of this rank's microbatches
    norms: list[list[float]] = field(default_factory=list)  # of each update's gradient in parts, before any clip
    num_bad: int = 0  # updates without a finite loss and gradient
    num_skipped: int = 0  # updates that changed no weight
    num_left_out: int = 0  # updates that were not made, as the policy had moved far enough
    num_blank: int = 0  # images of this rank that could not be decoded
    divergences: list[float] = field(default_factory=list)  # of each update, as `_divergence` has it
    last: list[list[Episode]] | None = None  # some of each context group's last microbatch
    watched: Watched | None = None  # takes down columns of tokens, in the first pass

    def done(self, episodes: Sequence[Episode], ranks: Ranks) -> dict[str, float]:
        """How much there was to do, where the time went and how fast it went; a collective."""
        own = sum(load.flops for load in self.loads)
        shared, computed = sum(load.shared for load in self.loads), sum(load.tokens for load in self.loads)
        sums = torch.tensor([own, self.num_blank, shared, computed], dtype=torch.float64, device=ranks.device)
        flops, num_blank, shared, computed = all_sum(sums, ranks).tolist()
        num_tokens, num_sampled = sum(e.num_tokens for e in episodes), sum(e.num_sampled for e in episodes)
        metrics = self.clock.metrics() | speed(flops, self.clock.total, ranks) | balance(self.loads, ranks)
        metrics |= {"batch/episodes": float(len(episodes)), "batch/sampled_tokens": float(num_sampled)}
        metrics |= {"batch/tokens": float(num_tokens), "batch/microbatches": float(len(self.loads))}
        metrics["batch/prefix_share"] = shared / max(shared + computed, 1)
        metrics["images/unreadable"] = num_blank
        metrics["speed/tokens_per_s"] = num_tokens / max(self.clock.total, 1e-9)
        return metrics
