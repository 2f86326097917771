"""Totals of one step's updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from learner.batch.episodes import TrainingEpisode
from learner.batch.rank_load import Load, balance
from learner.batch.update_plan import UpdatePlan
from learner.distributed import Ranks, all_sum
from learner.metrics.throughput import Clock, speed
from learner.metrics.token_metrics import TokenStats
from learner.objective.advantages import Scaling
from learner.recording.recorded_columns import RecordedColumns
from learner.training.precomputed import PrecomputedColumns
from shared.types import PolicyVersion


@dataclass(slots=True)
class StepTotals:
    """The inputs that one step's updates share, and the totals of their results."""

    version: PolicyVersion  # version of the policy as the step begins
    scaling: Scaling  # scaling of the critic's advantages and the policy's learning rate
    clock: Clock
    stats: TokenStats  # of the updates' tokens
    observed: TokenStats  # of tokens in episodes that no update computes
    precomputed: PrecomputedColumns  # columns computed before the step's first update
    recorded: RecordedColumns | None = None  # collects columns of tokens
    # what the pieces of an update's divided episodes need of each other
    pieces: PrecomputedColumns = field(default_factory=PrecomputedColumns)
    loads: list[Load] = field(default_factory=list)  # one for each microbatch of this rank
    # for each update the norms of its gradient's parts, before any clip
    norms: list[list[float]] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)  # KL(start, policy) per token before each update
    last: UpdatePlan | None = None  # the last update whose gradient was computed
    num_bad: int = 0  # updates with a loss or gradient that is not finite
    num_skipped: int = 0  # updates that changed no weight
    num_left_out: int = 0  # updates that were skipped because the policy had moved far enough
    num_blank: int = 0  # images of this rank that could not be decoded

    def metrics(self, episodes: Sequence[TrainingEpisode], ranks: Ranks) -> dict[str, float]:
        """Return metrics of the amount of work, the time of its parts, and the speed; a collective."""
        flops = sum(load.flops for load in self.loads)
        shared = sum(load.shared for load in self.loads)
        computed = sum(load.tokens for load in self.loads)
        sums = torch.tensor([flops, self.num_blank, shared, computed], dtype=torch.float64, device=ranks.device)
        flops, num_blank, shared, computed = all_sum(sums, ranks).tolist()
        num_tokens = sum(e.num_tokens for e in episodes)
        metrics = self.clock.metrics() | speed(flops, self.clock.total, ranks) | balance(self.loads, ranks)
        return metrics | {
            "batch/episodes": float(len(episodes)),
            "batch/sampled_tokens": float(sum(e.num_sampled for e in episodes)),
            "batch/tokens": float(num_tokens),
            "batch/microbatches": float(len(self.loads)),
            "batch/prefix_share": shared / max(shared + computed, 1),
            "images/unreadable": num_blank,
            "speed/tokens_per_s": num_tokens / max(self.clock.total, 1e-9),
        }
