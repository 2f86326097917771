"""Columns of tokens that are computed by forwards without gradient: before a step's first update the logprobs of the
policy as the step begins and of the reference; before an update what its pieces of episodes need of each other."""

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
from learner.batch.packer import turn_advantages_of
from learner.batch.update_plan import UpdatePlan
from learner.distributed import all_sum
from learner.model.context_collectives import lowest
from learner.model.sharding import forward_only
from learner.objective.advantages import penalised_advantages
from learner.objective.loss_terms import MAX_LOG_RATIO
from learner.training.models import Models

LAST_PLACE = 31  # in a turn, with a baseline of its own


class PrecomputedColumns:
    """Columns for the sampled tokens of some of a step's episodes, on this rank's device."""

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
        """Return the slice of a column for each of a microbatch's episodes or pieces."""
        if batch.empty:
            return []
        starts = [self._spans[index].start + first for index, first in zip(batch.indices, batch.firsts, strict=True)]
        return [slice(start, start + count) for start, count in zip(starts, batch.sampled, strict=True)]

    def of_whole_episodes(self, name: str, batch: Microbatch) -> Tensor | None:
        """Return a column for the whole episodes of a microbatch with pieces, float32 [W], with 1 for episodes that are
        not among these; None if it was not computed."""
        if name not in self._columns:
            return None
        assert batch.whole is not None
        column, places = self._columns[name], zip(batch.indices, batch.whole.sampled, strict=True)
        return torch.cat([column[self._spans[i]] if i in self._spans else column.new_ones(n) for i, n in places])

    def lower_to_episodes(self, name: str) -> None:
        """Replace a column by each episode's minimum."""
        for span in self._spans.values():
            self._columns[name][span] = self._columns[name][span].amin()

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
) -> PrecomputedColumns:
    """Return the logprobs of policy and reference for a step's episodes, as the step begins. A collective.

    `batches`: microbatches of all episodes that have a loss. If the KL is part of group-relative rewards, the resulting
    advantages are returned too.
    """
    precomputed = PrecomputedColumns(episodes)
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
        if objective.has_turn_advantages:
            of_tokens = of_tokens + turn_advantages_of(episodes)
        precomputed.set_column("advantages", torch.from_numpy(of_tokens).to(models.ranks.device))
    return precomputed


@torch.no_grad()
def precompute_teacher(
    precomputed: PrecomputedColumns,
    episodes: Sequence[TrainingEpisode],
    batches: Iterator[Microbatch],
    models: Models,
) -> None:
    """Add the teacher's logprobs of a step's episodes to the precomputed columns, and as baselines the means of log
    mu/teacher over all tokens at the same place in their turns. A collective.

    `batches`: microbatches of all episodes as the teacher reads them.
    """
    assert models.teacher is not None
    column = torch.zeros(precomputed.num_tokens, device=models.ranks.device)
    for batch in batches:
        logprobs_N = forward_only(models.teacher, batch, models.temperature).logprobs
        spans = precomputed.positions(batch)
        if spans and models.ranks.context.leads:
            for span, logprobs in zip(spans, logprobs_N.split(batch.sampled), strict=True):
                column[span] = logprobs
    all_sum(column, models.ranks)
    precomputed.set_column("teacher_logprobs", column)
    precomputed.set_column("teacher_baselines", teacher_baselines(episodes, column))


def teacher_baselines(episodes: Sequence[TrainingEpisode], teacher_N: Tensor) -> Tensor:
    """Return for each token of the episodes the mean of log mu/teacher over all of them at the same place in their
    turns. `teacher_N`: the teacher's logprobs."""
    places = np.concatenate([places_in_turns(e) for e in episodes])
    behaviour = np.concatenate([e.behaviour_logprobs for e in episodes])
    gaps = np.clip(behaviour - teacher_N.cpu().numpy(), -MAX_LOG_RATIO, None).astype(np.float64)
    means = np.bincount(places, gaps) / np.maximum(np.bincount(places), 1)
    return torch.from_numpy(means[places]).to(teacher_N)


def places_in_turns(episode: TrainingEpisode) -> np.ndarray:
    """Return the place of each sampled token in its turn, int64 [K], from 0; those from `LAST_PLACE` on count as it."""
    starts = np.concatenate([[0], np.flatnonzero(episode.turn_end)[:-1] + 1])
    lengths = np.diff([*starts, episode.num_sampled])
    return np.minimum(np.arange(episode.num_sampled) - np.repeat(starts, lengths), LAST_PLACE)


def _divergences(columns: Tensor, counts: list[int]) -> list[float]:
    """Return log(policy/reference) summed over each episode's tokens, in float64."""
    ends = np.cumsum(counts)[:-1]
    proximal, reference = (np.split(row, ends) for row in columns.cpu().numpy())
    return [float((p.astype(np.float64) - r).sum()) for p, r in zip(proximal, reference, strict=True)]


@torch.no_grad()
def precompute_pieces(plan: UpdatePlan, batches: Iterator[Microbatch], models: Models) -> PrecomputedColumns:
    """Return what the pieces of an update's divided episodes need of each other, with the policy as the update begins.
    A collective.

    These are logprobs, values, the reference's logprobs, and `readable`: 0 where any image of the episode is not.

    `batches`: the plan's microbatches of pieces.
    """
    objective, ranks = models.config.objective, models.ranks
    pieces = [piece for of_group in plan.of_groups for chosen in of_group for piece in chosen]
    whole = {piece.index: piece.whole for piece in pieces if piece.whole is not None}
    columns = PrecomputedColumns([whole[index] for index in sorted(whole)])
    names = ["logprobs", "values", "readable"]
    reads_reference = objective.kl_in_reward and models.reference is not None and not models.beforehand.reference
    if reads_reference:
        names.append("reference_logprobs")
    rows = torch.zeros(len(names), columns.num_tokens, device=ranks.device)
    for batch in batches:
        output = forward_only(models.policy, batch, models.temperature, return_lower=models.num_common)
        values = [output.logprobs, output.values, lowest(batch.readable, batch.shard)]
        if reads_reference:
            assert models.reference is not None
            reference = forward_only(
                models.reference, batch, models.temperature, output.lower, return_lower=models.num_common
            )
            values.append(reference.logprobs)
        spans = columns.positions(batch)
        if spans and ranks.context.leads:
            for row, values_N in zip(rows, values, strict=True):
                for span, part in zip(spans, values_N.split(batch.sampled), strict=True):
                    row[span] = part
    all_sum(rows, ranks)
    for name, row in zip(names, rows, strict=True):
        columns.set_column(name, row)
    columns.lower_to_episodes("readable")
    return columns
