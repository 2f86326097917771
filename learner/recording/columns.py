"""What the learner computed for the tokens of episodes that are recorded, from all ranks.

C = columns, K = sampled tokens of one episode, N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from learner.batch import Microbatch
from learner.distributed import Ranks, all_sum
from learner.objective.records import Loss, Tokens
from learner.recording.episodes import evenly
from shared.recordings.records import COLUMNS, ColumnName
from shared.sections import RecordConfig
from shared.types import Group


@torch.no_grad()
def recorded_columns(tokens: Tokens, loss: Loss) -> Tensor:
    """float32 [C,N], the rows as in COLUMNS."""
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


class Watched:
    """The columns of some of a step's episodes: given by each rank that trains one of them, then gathered."""

    def __init__(self, lengths: dict[int, int]) -> None:
        """`lengths`: sampled tokens of the episodes, by their place in the step; the same on every rank."""
        self._lengths = lengths
        self._found: dict[int, Tensor] = {}
        self._columns: dict[int, np.ndarray] = {}

    @property
    def places(self) -> frozenset[int]:
        return frozenset(self._lengths)

    def add(self, batch: Microbatch, columns_CN: Tensor) -> None:
        """Of one microbatch."""
        for place, (start, end) in zip(batch.places, pairwise([0, *accumulate(batch.sampled)]), strict=True):
            if place in self._lengths:
                self._found[place] = columns_CN[:, start:end]

    def gather(self, ranks: Ranks) -> None:
        """A collective."""
        starts = [0, *accumulate(self._lengths.values())]
        together = torch.zeros(len(COLUMNS) + 1, starts[-1], device=ranks.device)  # the last row: 1 where it is known
        for (place, length), start in zip(self._lengths.items(), starts, strict=False):
            if place in self._found:
                together[:-1, start : start + length] = self._found[place]
                together[-1, start : start + length] = 1
        rows = all_sum(together, ranks).cpu().numpy()
        for (place, length), start in zip(self._lengths.items(), starts, strict=False):
            if length and rows[-1, start] == 1:
                self._columns[place] = rows[:-1, start : start + length]
        self._found.clear()

    def columns(self, place: int) -> np.ndarray | None:
        """float32 [C,K] after `gather`; None for an episode that no update was computed on."""
        return self._columns.get(place)


def is_recorded(step: int, config: RecordConfig) -> bool:
    """Whether groups of this step are, beside what failed."""
    return config.every > 0 and config.groups > 0 and (step == 1 or step % config.every == 0)


def watch(groups: Sequence[Group], step: int, config: RecordConfig) -> Watched | None:
    """What of the step on `groups` is to be recorded, the same on every rank: groups at even distances."""
    if not is_recorded(step, config):
        return None
    chosen = evenly(config.groups, len(groups))
    lengths: dict[int, int] = {}
    place = 0
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            if number in chosen:
                lengths[place] = int(np.count_nonzero(trajectory.loss_mask)) if trajectory.trainable else 0
            place += 1
    return Watched(lengths)
