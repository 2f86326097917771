"""Sums over stretches of tokens (turns, episodes) that lie one after another. Shape suffixes: N tokens, S stretches."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_ids(end_N: Tensor) -> Tensor:
    """int64 [N]: which stretch a token is in; `end_N` is true at the last token of each."""
    return end_N.long().cumsum(0) - end_N.long()


def segment_sum(values_N: Tensor, end_N: Tensor) -> Tensor:
    """[N]: for each token the sum over its stretch."""
    ids_N = segment_ids(end_N)
    return torch.zeros_like(values_N).index_add(0, ids_N, values_N)[ids_N]


def segment_mean(values_N: Tensor, end_N: Tensor) -> Tensor:
    """[N]: for each token the mean over its stretch."""
    return segment_sum(values_N, end_N) / segment_sum(torch.ones_like(values_N), end_N)


def segment_start(end_N: Tensor) -> Tensor:
    """bool [N]: true at the first token of each stretch."""
    return torch.cat([torch.ones_like(end_N[:1]), end_N[:-1]])
