"""The tokens of an episode as the model reads them.

Shape suffixes: E = tokens with placeholders expanded, K = sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.types import Trajectory
from shared.vision import Grid, VisionSpec, expand, mrope_positions


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """The tokens of one episode."""

    input_ids: np.ndarray  # int64 [E]
    position_ids: np.ndarray  # int64 [4,E]: place in the document, then M-RoPE
    targets: np.ndarray  # int64 [K], places of the sampled tokens; the hidden state at targets-1 predicts them


def expand_trajectory(trajectory: Trajectory, grids: Sequence[Grid], spec: VisionSpec) -> Expanded:
    """Each image's placeholder repeated once for each of its visual tokens."""
    ids, compact_index = expand(trajectory.token_ids, grids, spec)
    positions = np.concatenate([np.arange(len(ids))[None], mrope_positions(ids, grids, spec)])
    return Expanded(ids, positions, np.flatnonzero(trajectory.loss_mask[compact_index]))
