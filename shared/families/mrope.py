"""Positions of the multimodal rotary embedding, in three axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's patches."""


def mrope_positions(
    expanded_ids: np.ndarray, grids: Sequence[Grid], *, image_token_id: int, merge_size: int
) -> np.ndarray:
    """Return int64[3, E], the positions (time, height, width) of the E tokens.

    Text advances all three axes by one per token; an image of h × w visual tokens spans its rows and columns from
    the position it starts at, and the next text follows after max(h, w). ValueError if the number of placeholders is
    not that of the images' visual tokens.
    """
    ids = np.asarray(expanded_ids)
    positions = np.empty((3, len(ids)), dtype=np.int64)
    index = position = 0
    for start, (t, h, w) in zip(_image_starts(ids, grids, image_token_id, merge_size), grids, strict=True):
        positions[:, index:start] = np.arange(position, position + start - index)
        position += start - index
        rows, columns = h // merge_size, w // merge_size
        block = positions[:, start : start + t * rows * columns].reshape(3, t, rows, columns)
        block[0] = np.arange(position, position + t)[:, None, None]
        block[1] = np.arange(position, position + rows)[None, :, None]
        block[2] = np.arange(position, position + columns)[None, None, :]
        index = start + t * rows * columns
        position += max(rows, columns)
    positions[:, index:] = np.arange(position, position + len(ids) - index)
    return positions


def _image_starts(ids: np.ndarray, grids: Sequence[Grid], image_token_id: int, merge_size: int) -> list[int]:
    indices = np.flatnonzero(ids == image_token_id)
    sizes = [t * h * w // merge_size**2 for t, h, w in grids]
    if len(indices) != sum(sizes):
        raise ValueError(f"{len(indices)} visual tokens in the stream, but the images have {sum(sizes)}")
    return [int(indices[offset]) for offset in np.cumsum([0, *sizes])[:-1]]
