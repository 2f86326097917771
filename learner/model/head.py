"""The policy's output head: computes logprobs, entropies and labels from the hidden states that predict sampled tokens.

If ranks share a microbatch (context parallelism), every rank gets the results for all its tokens.

Shape suffixes: N = sampled tokens of the microbatch, n = those whose hidden states this rank has (one stand-in if
none), K = labels of the microbatch, k = labels of this rank, H = hidden size, V = vocabulary, R = rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, log1p

import torch
from torch import Tensor

from kernels.linear_logprob import linear_logprob
from learner.batch.context_shard import ContextShard
from learner.model.context_collectives import whole_columns
from learner.objective.loss_records import Labels

CHUNK_BYTES = 1 << 26  # logits that exist at a time


class OutputHead:
    """The output head at one temperature, for the hidden states of one rank."""

    def __init__(
        self, weight_VH: Tensor, temperature: float, banned_ids: Sequence[int], shard: ContextShard | None
    ) -> None:
        self.weight_VH, self.temperature, self.banned_ids, self.shard = weight_VH, temperature, banned_ids, shard

    def select_own(self, all_N: Tensor) -> Tensor:
        """Return the part [n] of a microbatch's column [N] that belongs to this rank's hidden states."""
        return all_N if self.shard is None else all_N.index_select(0, self.shard.predictions)

    def gather(self, columns: list[Tensor]) -> list[Tensor]:
        """Gather columns [n] of this rank, all of one dtype, into columns [N] of all ranks; a collective."""
        return columns if self.shard is None else whole_columns(columns, self.shard)

    def logprobs(self, hidden_nH: Tensor, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return differentiable logprobs of these tokens, and entropies: float32 [n] each."""
        return linear_logprob(
            hidden_nH, self.weight_VH, ids_n, temperature=self.temperature, banned_ids=self.banned_ids
        )

    def find_labels(self, hidden_nH: Tensor, logprobs_n: Tensor, threshold: float) -> Labels:
        """Return the labels: the tokens whose probability is at least `threshold`; a collective."""
        labels = find_labels(
            hidden_nH,
            self.weight_VH,
            logprobs_n,
            threshold=threshold,
            temperature=self.temperature,
            banned_ids=self.banned_ids,
        )
        if self.shard is None:
            return labels
        ids_n = torch.full_like(labels.agrees_N, -1, dtype=torch.int64).index_copy(0, labels.rows_K, labels.ids_K)
        agrees_N, ids_N = self.gather([labels.agrees_N.long(), ids_n])
        rows_K = (ids_N >= 0).nonzero()[:, 0]
        return Labels(agrees_N.bool(), rows_K, ids_N[rows_K])

    def label_logprobs(self, hidden_nH: Tensor, labels: Labels) -> Tensor:
        """Return differentiable logprobs of the microbatch's labels, float32 [K]; a collective."""
        if self.shard is None:
            return self.logprobs(hidden_nH[labels.rows_K], labels.ids_K)[0]
        ids_N = torch.full_like(labels.agrees_N, -1, dtype=torch.int64).index_copy(0, labels.rows_K, labels.ids_K)
        ids_n = self.select_own(ids_N)
        rows_k = (ids_n >= 0).nonzero()[:, 0]
        logprobs_k, _ = self.logprobs(hidden_nH[rows_k], ids_n[rows_k])
        logprobs_n = torch.zeros(len(ids_n), device=logprobs_k.device).index_copy(0, rows_k, logprobs_k)
        (logprobs_N,) = self.gather([logprobs_n])
        return logprobs_N[labels.rows_K]


@torch.no_grad()
def find_labels(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    logprobs_N: Tensor,
    *,
    threshold: float,
    temperature: float,
    banned_ids: Sequence[int] = (),
) -> Labels:
    """Return the tokens whose probability in softmax(hidden @ weight.T / temperature), without `banned_ids`, is at
    least `threshold`.

    `logprobs_N`: the sampled tokens' logprobs under the same policy. Logits are computed only for rows in which another
    token than the sampled one can reach the threshold. `threshold` must be above 0.5, so that a row has at most one
    label. On a GPU the host waits twice.
    """
    open_rows = (logprobs_N < log1p(-threshold)).nonzero()[:, 0]
    rows, ids = [open_rows[:0]], [open_rows[:0]]
    for rows_R in open_rows.split(max(1, CHUNK_BYTES // (4 * len(weight_VH)))):
        logits_RV = (hidden_NH[rows_R] @ weight_VH.T).float() / temperature
        logits_RV[:, list(banned_ids)] = -torch.inf
        highest_R, ids_R = logits_RV.max(-1)
        is_label_R = highest_R - logits_RV.logsumexp(-1) >= log(threshold)
        rows.append(rows_R[is_label_R])
        ids.append(ids_R[is_label_R])
    return Labels(logprobs_N >= log(threshold), torch.cat(rows), torch.cat(ids))
