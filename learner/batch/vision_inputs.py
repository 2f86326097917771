"""Inputs of a vision tower that depend only on the images' grids, computed on the host: on a GPU, the tower would wait
for them.

Shape suffixes: I = images, P = their patches, M = their visual tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from learner.batch.packing import Packing, packing_of
from shared.vision import Grid, VisionSpec

POSITION_FIELDS = ("position_ids", "interp_indices", "interp_weights")
MODE, ALIGN_CORNERS = "bilinear", True  # interpolation of Qwen3-VL's learned positions


@dataclass(frozen=True, slots=True, eq=False)
class TowerInputs:
    """A tower's inputs for some images, besides their patches. Inputs that the tower does not use are None."""

    grids_thw: Tensor  # int64 [I,3]
    packing: Packing
    position_ids: Tensor  # int64 [P,2], for the rotary embedding
    interp_indices: Tensor | None = None  # int64 [P,4], indices of learned positions
    interp_weights: Tensor | None = None  # float32 [P,4]
    window_index: Tensor | None = None  # int64 [M], visual tokens in the order of windows

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the tower's forward, as transformers names them."""
        packing, windows = self.packing, self.packing.windows
        given: dict[str, Any] = {"grid_thw": self.grids_thw, "position_ids": self.position_ids, "packing": packing}
        given |= {"cu_seqlens": packing.cu_seqlens, "max_seqlen": packing.max_length}
        if self.interp_indices is not None:
            given |= {"interp_indices": self.interp_indices, "interp_weights": self.interp_weights}
        if windows is not None:
            given |= {"window_index": self.window_index, "cu_window_seqlens": windows.cu_seqlens}
            given["max_window_seqlen"] = windows.max_length
        return given


def tower_inputs(grids: Sequence[Grid], spec: VisionSpec) -> TowerInputs:
    """Return the tower's inputs for at least one image with these grids, on the host."""
    thw, merge = torch.tensor(grids, dtype=torch.int64), spec.merge_size
    of_images = zip(*(_positions(grid, merge, spec.position_side) for grid in grids), strict=True)
    positions: dict[str, Any] = dict(zip(POSITION_FIELDS, map(torch.cat, of_images), strict=False))
    windows = None
    if spec.window_tokens:
        pixels = spec.window_tokens * merge * spec.patch_size
        positions["window_index"], _ = get_vision_window_index(thw, merge, pixels, spec.patch_size)
        lengths = window_lengths(grids, merge_size=merge, window_tokens=spec.window_tokens)
        windows = packing_of(lengths, causal=False)
    packing = packing_of(tuple(prod(grid) for grid in grids), causal=False)
    return TowerInputs(thw, replace(packing, windows=windows), **positions)


def window_lengths(grids: Iterable[Grid], *, merge_size: int, window_tokens: int) -> tuple[int, ...]:
    """Return the number of patches in each window of images with these grids, in Qwen2.5-VL's order: image by image,
    row by row.

    A window is a square of `window_tokens` x `window_tokens` visual tokens, smaller at the right and lower edges.
    """
    lengths = []
    for frames, height, width in grids:
        rows, columns = (_cut_side(side // merge_size, window_tokens) for side in (height, width))
        lengths += [row * column * merge_size**2 for row in rows for column in columns] * frames
    return tuple(lengths)


def _cut_side(side: int, most: int) -> list[int]:
    return [min(most, side - start) for start in range(0, side, most)]


@lru_cache(maxsize=32)  # one image of 1024 x 1024 pixels takes 0.3 MB
def _positions(grid: Grid, merge: int, side: int) -> tuple[Tensor, ...]:
    """Return the positions of an image's patches, in the order of `POSITION_FIELDS`.

    Only the first field is returned if `side`, the tower's number of learned positions per side, is 0. The tensors are
    shared and must not be written to.
    """
    thw = torch.tensor([grid], dtype=torch.int64)
    positions = get_vision_position_ids(thw, merge)
    if not side:
        return (positions,)
    learned = get_vision_interpolation_indices_and_weights(
        thw, side, mode=MODE, align_corners=ALIGN_CORNERS, spatial_merge_size=merge
    )
    return positions, *learned


def takes_precomputed() -> bool:
    """Tell whether transformers' towers accept precomputed results of these functions as arguments."""
    functions = (get_vision_interpolation_indices_and_weights, get_vision_position_ids, get_vision_window_index)
    return all("kwargs" in inspect.signature(function).parameters for function in functions)


def with_tower(spec: VisionSpec, vision_config: Any) -> VisionSpec:
    """Return `spec` with the learned positions and windows of the tower with this config; None = it has no tower."""
    positions, window = (getattr(vision_config, name, 0) for name in ("num_position_embeddings", "window_size"))
    unit = spec.patch_size * spec.merge_size
    return replace(spec, position_side=isqrt(positions), window_tokens=window // unit)
