"""From images to model inputs: placeholder expansion, positions, sizes after resizing, and patches, in NumPy alone.

E = tokens of the expanded stream (one placeholder per visual token), T = tokens of the compact stream (one per
image). A grid (t, h, w) counts the patches of one image; its visual tokens are t * h * w / merge_size**2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.families.model_family import ModelFamily
from shared.families.mrope import Grid
from shared.families.registry import family_of, read_json

MAX_ASPECT_RATIO = 200

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")  # formats that untrusted data may be decoded as
MAX_IMAGE_PIXELS = 1 << 26  # a file whose header claims more is refused before decoding


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """How a model's images are cut into patches and tokens; `min_pixels` and `max_pixels` bound an image's area after
    resizing. Of a text model only the family is meant, and its image token occurs in no stream."""

    image_token_id: int
    family: ModelFamily
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    banned_ids: tuple[int, ...] = ()  # the vision tokens, sorted: no policy may sample them
    position_side: int = 0  # side of the square of learned positions; 0 = none, or set later by the learner
    window_tokens: int = 0  # side of a window in visual tokens; 0 = none, or set later by the learner

    @staticmethod
    def load(model_dir: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None) -> VisionSpec:
        """Read a model folder's config.json and preprocessor_config.json; raise ValueError if one is missing or not
        usable."""
        config = read_json(Path(model_dir) / "config.json")
        family = family_of(config, model_dir)
        images = read_json(Path(model_dir) / "preprocessor_config.json") if family.takes_images else {}
        try:
            fields = family.vision_fields(config, images)
        except ValueError as error:
            raise ValueError(f"{model_dir} is not a vision-language model: {error}") from None
        bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        return VisionSpec(family=family, **fields | {name: bound for name, bound in bounds.items() if bound})

    @property
    def takes_images(self) -> bool:
        return self.family.takes_images

    def grid(self, width: int, height: int) -> Grid:
        """Return the patch grid of an image of `width` × `height` pixels. ValueError if it is too narrow, or the model
        takes no images."""
        if not self.takes_images:
            raise ValueError(f"an image, but {self.family.title} is a family of text models, which take none")
        new_height, new_width = self.resized(width, height)
        return (1, new_height // self.patch_size, new_width // self.patch_size)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width) after resizing: multiples of a visual token's side, with the area within the
        bounds."""
        if min(width, height) < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ValueError(
                f"an image of {width}x{height} pixels: its sides may differ {MAX_ASPECT_RATIO}-fold at most"
            )
        unit = self.patch_size * self.merge_size
        width, height = self.family.before_resizing(width, height, unit)
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit * unit < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return rows * unit, columns * unit

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of visual tokens of one image."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def position_ids(self, expanded_ids: np.ndarray, grids_thw: Sequence[Grid]) -> np.ndarray:
        """Return int64[3, E], the positions (time, height, width) of an expanded stream, as the family counts them.
        ValueError if the number of placeholders is not that of the images' visual tokens."""
        return self.family.position_ids(
            expanded_ids, grids_thw, image_token_id=self.image_token_id, merge_size=self.merge_size
        )


def expand(
    token_ids: Sequence[int] | np.ndarray, grids_thw: Sequence[Grid], spec: VisionSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Return (expanded_ids int64[E], compact_index int32[E]): each placeholder is repeated once per visual token.

    `compact_index` holds, for each expanded token, its index in the compact stream. Raise ValueError if the number of
    placeholders differs from the number of grids.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    indices = np.flatnonzero(ids == spec.image_token_id)
    if len(indices) != len(grids_thw):
        raise ValueError(f"{len(indices)} image placeholders but {len(grids_thw)} images")
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[indices] = [spec.num_tokens(grid) for grid in grids_thw]
    compact_index = np.repeat(np.arange(len(ids), dtype=np.int32), repeats)
    return ids[compact_index], compact_index


def next_position(positions: np.ndarray) -> int:
    """Return the position of the token that follows int64[3, E] `positions`."""
    return int(positions.max()) + 1 if positions.size else 0


def patchify(rgb: np.ndarray, spec: VisionSpec) -> np.ndarray:
    """Cut uint8 [H, W, 3] into uint8 [patches, 3, patch, patch], patches in merge-block order.

    H and W must be multiples of patch_size * merge_size (see `VisionSpec.resized`).
    """
    (height, width, _), patch, merge = rgb.shape, spec.patch_size, spec.merge_size
    blocks = rgb.reshape(height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, patch, patch)


def pixel_values(patches: np.ndarray, spec: VisionSpec) -> np.ndarray:
    """Normalise uint8 [patches, 3, patch, patch]; return float32 [patches, 3 * temporal * patch * patch].

    A still image fills the temporal patch with copies of itself, as the image processor does.
    """
    mean, std = (np.asarray(each, dtype=np.float32)[:, None, None] for each in (spec.mean, spec.std))
    values = (patches.astype(np.float32) * np.float32(1 / 255) - mean) / std
    values = np.repeat(values[:, :, None], spec.temporal_patch_size, axis=2)
    return values.reshape(len(patches), -1)
