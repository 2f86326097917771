"""How even the work of the ranks is: they wait for one another in every microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from learner.distributed import Ranks, all_sum


class Load(NamedTuple):
    """What one rank has of one microbatch."""

    tokens: int  # that are computed
    flops: float  # of forward and backward; 0 where the model's sizes are not known
    shared: int = 0  # tokens that another episode's prefix stands for


def balance(loads: Sequence[Load], ranks: Ranks) -> dict[str, float]:
    """`parallel/*` of a step's microbatches; nothing on a single rank. A collective: every rank has as many.

    The imbalance is the sum over microbatches of the busiest rank's operations over that of the mean rank's: as long
    as the ranks wait for the busiest, a step takes so many times what it would if all were equal. Where the sizes of
    the model are not known it is the tokens'.
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
