"""The learner's results for the tokens of recorded episodes, from all ranks.

C = columns, K = sampled tokens of one episode, N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from learner.batch.microbatch import Microbatch
from learner.distributed import Ranks, all_max, all_sum
from learner.objective.loss_records import Loss, Tokens
from learner.recording.episode_records import evenly
from shared.config.sections import RecordConfig
from shared.recordings.episode_format import COLUMNS, ColumnName
from shared.types import Group


@torch.no_grad()
def recorded_columns(tokens: Tokens, loss: Loss) -> Tensor:
    """Return the columns of a record, float32 [C,N], with the rows in the order of COLUMNS."""
    dropped = torch.zeros_like(loss.clipped_N) if loss.dropped is None else loss.dropped.any_N
    columns: dict[ColumnName, Tensor] = {
        "logprob": tokens.logprobs,
        "entropy": tokens.entropies,
        "value": tokens.values,
        "target": loss.vs_N,
        "advantage": loss.advantages_N,
        "ratio": (tokens.logprobs - tokens.behaviour_logprobs).exp(),
        "clipped": loss.clipped_N,
        "masked": dropped,
    }
    return torch.stack([columns[name].detach().float() for name in COLUMNS])


class RecordedColumns:
    """The columns of some of a step's episodes: added on each rank that trains one of them, then gathered."""

    def __init__(self, lengths: dict[int, int]) -> None:
        """Prepare for some episodes. `lengths`: sampled tokens of each by its index in the step, the same on every
        rank."""
        self._lengths = lengths
        self._added: dict[tuple[int, int], tuple[int, Tensor]] = {}  # (index, first token) -> (update, columns)
        self._columns: dict[int, np.ndarray] = {}

    @property
    def indices(self) -> frozenset[int]:
        return frozenset(self._lengths)

    def add(self, batch: Microbatch, columns_CN: Tensor, update: int) -> None:
        """Add the columns of one microbatch of an update, counted from 0. If several passes train on an episode, the
        columns of the first pass are kept."""
        spans = pairwise([0, *accumulate(batch.sampled)])
        for index, first, (start, end) in zip(batch.indices, batch.firsts, spans, strict=True):
            if index in self._lengths and (index, first) not in self._added:
                self._added[index, first] = update, columns_CN[:, start:end]

    def gather(self, ranks: Ranks) -> None:
        """Collect the columns of all ranks on every rank; a collective."""
        *places, total = accumulate(self._lengths.values(), initial=0)
        starts = dict(zip(self._lengths, places, strict=True))
        # Another pass may have been on another rank: of each token the first update counts.
        earliness = torch.full((total,), -torch.inf, device=ranks.device)
        for (index, first), (update, columns) in self._added.items():
            start = starts[index] + first
            earliness[start : start + columns.shape[1]] = -update
        own = earliness.clone()
        all_max(earliness, ranks)
        together = torch.zeros(len(COLUMNS), total, device=ranks.device)
        for (index, first), (_, columns) in self._added.items():
            start = starts[index] + first
            together[:, start : start + columns.shape[1]] = columns
        rows = all_sum(together.masked_fill(own < earliness, 0.0), ranks).cpu().numpy()
        known = earliness.isfinite().cpu().numpy()
        for index, length in self._lengths.items():
            span = slice(starts[index], starts[index] + length)
            if length and known[span].all():
                self._columns[index] = rows[:, span]
        self._added.clear()

    def columns(self, index: int) -> np.ndarray | None:
        """Return an episode's columns, float32 [C,K], after `gather`; None if no update was computed on it."""
        return self._columns.get(index)


def is_recorded(step: int, config: RecordConfig) -> bool:
    """Tell whether trained groups of this step are recorded, besides failed episodes."""
    return config.every > 0 and config.groups > 0 and (step == 1 or step % config.every == 0)


def watch(groups: Sequence[Group], step: int, config: RecordConfig) -> RecordedColumns | None:
    """Choose evenly spaced groups of a step to record, the same on every rank; None if this step is not recorded."""
    if not is_recorded(step, config):
        return None
    chosen = evenly(config.groups, len(groups))
    lengths: dict[int, int] = {}
    index = 0
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            if number in chosen:
                lengths[index] = int(np.count_nonzero(trajectory.loss_mask)) if trajectory.trainable else 0
            index += 1
    return RecordedColumns(lengths)
