"""Logprobs that are computed before a step's first update: those of the policy as the step begins, and of the
reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.batch.episodes import TrainingEpisode
from learner.batch.microbatch import Microbatch
from learner.distributed import all_sum
from learner.objective.advantages import penalised_advantages
from learner.training.models import Models


class PrecomputedLogprobs:
    """Columns for a step's sampled tokens, on this rank's device, that every update uses."""

    def __init__(self, episodes: Sequence[TrainingEpisode] = ()) -> None:
        ends = np.cumsum([0, *(e.num_sampled for e in episodes)]).tolist()
        spans = [slice(*span) for span in pairwise(ends)]
        self.num_tokens: int = ends[-1]
        self._spans = {e.index: span for e, span in zip(episodes, spans, strict=True)}
        self._columns: dict[str, Tensor] = {}  # name in a microbatch -> [tokens of all episodes]

    def set_column(self, name: str, values: Tensor) -> None:
        """Store a column, float32 [tokens of all episodes], under its name in a microbatch."""
        self._columns[name] = values

    def positions(self, batch: Microbatch) -> list[slice]:
        """Return the slice of a column for each of a microbatch's episodes."""
        return [] if batch.empty else [self._spans[index] for index in batch.indices]

    def add_to(self, batch: Microbatch) -> Microbatch:
        """Return the microbatch with the precomputed columns of its tokens."""
        if batch.empty or not self._columns:
            return batch
        spans = self.positions(batch)
        columns: dict[str, Any] = {
            name: torch.cat([column[span] for span in spans]) for name, column in self._columns.items()
        }
        return replace(batch, **columns)


@torch.no_grad()
def precompute_logprobs(
    episodes: Sequence[TrainingEpisode], batches: Iterator[Microbatch], models: Models
) -> PrecomputedLogprobs:
    """Return the logprobs of policy and reference for a step's episodes, as the step begins. A collective.

    `batches`: microbatches of all episodes that have a loss. If the KL is part of group-relative rewards, the resulting
    advantages are returned too.
    """
    precomputed = PrecomputedLogprobs(episodes)
    wanted = models.beforehand
    columns = torch.zeros(2, precomputed.num_tokens, device=models.ranks.device)  # row 0: policy, row 1: reference
    for batch in batches:
        spans = precomputed.positions(batch)
        for row, logprobs_N in zip(columns, models.logprobs_beforehand(batch), strict=True):
            if logprobs_N is not None and models.ranks.context.leads:
                for span, logprobs in zip(spans, logprobs_N.split(batch.sampled), strict=False):
                    row[span] = logprobs
    all_sum(columns, models.ranks)
    if wanted.policy:
        precomputed.set_column("proximal_logprobs", columns[0])
    if wanted.reference:
        precomputed.set_column("reference_logprobs", columns[1])
    objective = models.config.objective
    if objective.kl_in_reward and objective.is_group_relative:
        divergences = _divergences(columns, [e.num_sampled for e in episodes])
        advantages = np.array(penalised_advantages(episodes, divergences, objective), dtype=np.float32)
        of_tokens = np.repeat(advantages, [e.num_sampled for e in episodes])
        precomputed.set_column("advantages", torch.from_numpy(of_tokens).to(models.ranks.device))
    return precomputed


def _divergences(columns: Tensor, counts: list[int]) -> list[float]:
    """Return log(policy/reference) summed over each episode's tokens, in float64."""
    ends = np.cumsum(counts)[:-1]
    proximal, reference = (np.split(row, ends) for row in columns.cpu().numpy())
    return [float((p.astype(np.float64) - r).sum()) for p, r in zip(proximal, reference, strict=True)]
