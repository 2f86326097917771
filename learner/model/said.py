"""From hidden states that predict sampled tokens to what the policy says of these: of all tokens of a microbatch, on
every rank that shares it.

Shape suffixes: N = sampled tokens of the microbatch, n = those whose hidden states this rank has (a stand-in if none),
K and k = labels of the one and the other, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear_logprob import linear_logprob
from learner.model.labels import sure_labels
from learner.objective.records import Labels
from learner.parallel.collectives import whole_columns
from learner.parallel.share import Share


class Head:
    """The output head at one temperature, for hidden states of one rank."""

    def __init__(self, weight_VH: Tensor, temperature: float, banned_ids: Sequence[int], share: Share | None) -> None:
        self.weight_VH, self.temperature, self.banned_ids, self.share = weight_VH, temperature, banned_ids, share

    def own(self, all_N: Tensor) -> Tensor:
        """Of a column of the microbatch, what belongs to this rank's hidden states: [n]."""
        return all_N if self.share is None else all_N.index_select(0, self.share.own)

    def whole(self, columns: list[Tensor]) -> list[Tensor]:
        """Of columns [n] of one dtype, all ranks' [N]; a collective."""
        return columns if self.share is None else whole_columns(columns, self.share)

    def logprobs(self, hidden_nH: Tensor, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        """Differentiable log-probabilities of these tokens, and entropies: float32 [n]."""
        return linear_logprob(
            hidden_nH, self.weight_VH, ids_n, temperature=self.temperature, banned_ids=self.banned_ids
        )

    def sure_of(self, hidden_nH: Tensor, logprobs_n: Tensor, least: float) -> Labels:
        """What has at least this probability; a collective."""
        found = sure_labels(
            hidden_nH,
            self.weight_VH,
            logprobs_n,
            least=least,
            temperature=self.temperature,
            banned_ids=self.banned_ids,
        )
        if self.share is None:
            return found
        ids_n = torch.full_like(found.agrees_N, -1, dtype=torch.int64).index_copy(0, found.rows_K, found.ids_K)
        agrees_N, ids_N = self.whole([found.agrees_N.long(), ids_n])
        rows_K = (ids_N >= 0).nonzero()[:, 0]
        return Labels(agrees_N.bool(), rows_K, ids_N[rows_K])

    def of_labels(self, hidden_nH: Tensor, labels: Labels) -> Tensor:
        """Differentiable log-probabilities of the microbatch's labels, float32 [K]; a collective."""
        if self.share is None:
            return self.logprobs(hidden_nH[labels.rows_K], labels.ids_K)[0]
        ids_N = torch.full_like(labels.agrees_N, -1, dtype=torch.int64).index_copy(0, labels.rows_K, labels.ids_K)
        ids_n = self.own(ids_N)
        rows_k = (ids_n >= 0).nonzero()[:, 0]
        found_k, _ = self.logprobs(hidden_nH[rows_k], ids_n[rows_k])
        (found_N,) = self.whole([torch.zeros(len(ids_n), device=found_k.device).index_copy(0, rows_k, found_k)])
        return found_N[labels.rows_K]
