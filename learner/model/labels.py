"""What a policy is sure of: for each sampled token, the one to which it gives most of the probability.

Shape suffixes: N = sampled tokens, K = those of them where it is sure of another token, H = hidden size, V =
vocabulary, R = rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, log1p

import torch
from torch import Tensor

from learner.objective.records import Labels

CHUNK_BYTES = 1 << 26  # of logits that exist at a time


@torch.no_grad()
def sure_labels(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    logprobs_N: Tensor,
    *,
    least: float,
    temperature: float,
    banned_ids: Sequence[int] = (),
) -> Labels:
    """The tokens of probability `least` or more, of softmax(hidden @ weight.T / temperature) without `banned_ids`.

    `logprobs_N`: of the sampled tokens, under the same policy. Only rows whose sampled token leaves room for another
    such token are multiplied out. `least` is above 0.5, so that a row has one at most. On a GPU it waits twice.
    """
    open_rows = (logprobs_N < log1p(-least)).nonzero()[:, 0]
    rows, ids = [open_rows[:0]], [open_rows[:0]]
    for rows_R in open_rows.split(max(1, CHUNK_BYTES // (4 * len(weight_VH)))):
        logits_RV = (hidden_NH[rows_R] @ weight_VH.T).float() / temperature
        logits_RV[:, list(banned_ids)] = -torch.inf
        highest_R, ids_R = logits_RV.max(-1)
        sure_R = highest_R - logits_RV.logsumexp(-1) >= log(least)
        rows.append(rows_R[sure_R])
        ids.append(ids_R[sure_R])
    return Labels(logprobs_N >= log(least), torch.cat(rows), torch.cat(ids))
