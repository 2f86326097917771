"""The columns of an episode's record and their dtypes; needs no torch. C = columns, K = sampled tokens of one
episode."""

from __future__ import annotations

import numpy as np

from shared.recordings.episode_format import COLUMNS, ColumnName

CRITIC_COLUMNS: frozenset[ColumnName] = frozenset({"value", "target"})
FLAGS: frozenset[ColumnName] = frozenset({"clipped", "masked"})


def column_names(*, group_relative: bool) -> tuple[ColumnName, ...]:
    return tuple(name for name in COLUMNS if not (group_relative and name in CRITIC_COLUMNS))


def as_arrays(columns_CK: np.ndarray, *, group_relative: bool) -> dict[ColumnName, np.ndarray]:
    """Return the rows of `learner.recording.recorded_columns.recorded_columns` by name, flags as bytes."""
    names = column_names(group_relative=group_relative)
    rows = {name: row for name, row in zip(COLUMNS, columns_CK, strict=True) if name in names}
    return {name: row.astype(np.uint8 if name in FLAGS else np.float32) for name, row in rows.items()}
