"""What a vision tower derives from the images' grids, computed on the host: on a GPU the tower would wait for it.

Shape suffixes: I = images, P = their patches, M = their visual tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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

from learner.packing.documents import Packing, packing_of, window_lengths
from shared.vision import Grid, VisionSpec

PLACES = ("position_ids", "interp_indices", "interp_weights")
MODE, ALIGN_CORNERS = "bilinear", True  # of the interpolation of Qwen3-VL's learned positions


@dataclass(frozen=True, slots=True, eq=False)
class TowerInputs:
    """Of images, beside their patches; what a tower has no use for is None."""

    grids_thw: Tensor  # int64 [I,3]
    packing: Packing
    position_ids: Tensor  # int64 [P,2], of the rotary embedding
    interp_indices: Tensor | None = None  # int64 [P,4], into the learned positions
    interp_weights: Tensor | None = None  # float32 [P,4]
    window_index: Tensor | None = None  # int64 [M], visual tokens window by window

    def arguments(self) -> dict[str, Any]:
        """Of the tower's forward, as transformers names them."""
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
    """On the host, of at least one image."""
    thw, merge = torch.tensor(grids, dtype=torch.int64), spec.merge_size
    packing = packing_of(tuple(prod(grid) for grid in grids), causal=False)
    of_images = zip(*(_places(grid, merge, spec.position_side) for grid in grids), strict=True)
    found: dict[str, Any] = dict(zip(PLACES, map(torch.cat, of_images), strict=False))
    if spec.window_tokens:
        pixels = spec.window_tokens * merge * spec.patch_size
        found["window_index"], _ = get_vision_window_index(thw, merge, pixels, spec.patch_size)
        lengths = window_lengths(grids, merge_size=merge, window_tokens=spec.window_tokens)
        packing = replace(packing, windows=packing_of(lengths, causal=False))
    return TowerInputs(thw, packing, **found)


@lru_cache(maxsize=32)  # those of an image of 1024 x 1024 pixels take 0.3 MB
def _places(grid: Grid, merge: int, side: int) -> tuple[Tensor, ...]:
    """Of an image's patches, as `PLACES` names them: all of them where the tower has `side` learned positions a side,
    else the first. Nobody writes to them."""
    thw = torch.tensor([grid], dtype=torch.int64)
    positions = get_vision_position_ids(thw, merge)
    if not side:
        return (positions,)
    learned = get_vision_interpolation_indices_and_weights(
        thw, side, mode=MODE, align_corners=ALIGN_CORNERS, spatial_merge_size=merge
    )
    return positions, *learned


def takes_precomputed() -> bool:
    """Whether transformers' towers ask these functions, which give back what the tower was given."""
    known = (get_vision_interpolation_indices_and_weights, get_vision_position_ids, get_vision_window_index)
    return all("kwargs" in inspect.signature(function).parameters for function in known)


def with_tower(spec: VisionSpec, vision_config: Any) -> VisionSpec:
    """What the tower of this config has: learned positions, windows."""
    positions, window = (getattr(vision_config, name, 0) for name in ("num_position_embeddings", "window_size"))
    unit = spec.patch_size * spec.merge_size
    return replace(spec, position_side=isqrt(positions), window_tokens=window // unit)


def blank(spec: VisionSpec) -> tuple[Grid, ...]:
    """The grid of an image of one visual token, for a tower that has nothing to look at."""
    return ((1, spec.merge_size, spec.merge_size),)
