"""The balance of work between ranks, which wait for each other in every microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from learner.batch.microbatch import Microbatch
from learner.distributed import Ranks, all_sum
from shared.families.model_sizes import ModelSizes


class Load(NamedTuple):
    """The work of one rank in one microbatch."""

    tokens: int  # number of tokens that are computed
    flops: float  # operations of forward and backward; 0 if the model's sizes are unknown
    shared: int = 0  # number of tokens for which another episode's prefix is used


def load_of(batch: Microbatch, sizes: ModelSizes | None) -> Load:
    """Return this rank's work in a microbatch. `sizes`: None if the model's sizes are unknown."""
    if batch.empty:
        return Load(0, 0.0)
    shard, tokens, rows = batch.shard, batch.input_ids.shape[1], batch.num_tokens
    pairs, shared = sum(n * (n + 1) // 2 for n in batch.lengths), 0
    if (prefixes := batch.packing.prefixes) is not None:
        pairs, shared = pairs - prefixes.saved_pairs, sum(batch.lengths) - tokens
    if shard is not None:
        pairs, rows = sum(chunk.pairs for chunk in shard.chunks), shard.num_predictions
    flops = 0.0 if sizes is None else 3 * sizes.part_flops(tokens, pairs, batch.image_lengths, rows)
    return Load(tokens, flops, shared)


def balance(loads: Sequence[Load], ranks: Ranks) -> dict[str, float]:
    """Return the metrics `parallel/*` of a step's microbatches; empty on a single rank. A collective: every rank has
    equally many microbatches.

    The imbalance is the sum over microbatches of the busiest rank's operations, divided by that of the mean over ranks.
    Since all ranks wait for the busiest, a step takes so many times longer than with equal work. If the model's sizes
    are unknown, tokens are counted instead.
    """
    if ranks.size == 1 or not loads:
        return {}
    table = torch.zeros(2, len(loads), ranks.size, dtype=torch.float64)  # tokens, operations
    table[:, :, ranks.rank] = torch.tensor([load[:2] for load in loads], dtype=torch.float64).T
    tokens_MR, flops_MR = all_sum(table.to(ranks.device), ranks).cpu()
    counted_MR = flops_MR if flops_MR.any() else tokens_MR
    mean = float(counted_MR.mean(1).sum())
    return {
        "parallel/tokens_max": float(tokens_MR.sum(0).max()),
        "parallel/tokens_mean": float(tokens_MR.sum(0).mean()),
        "parallel/imbalance": float(counted_MR.amax(1).sum()) / mean if mean else 1.0,
    }
