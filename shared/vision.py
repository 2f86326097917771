"""What images become: placeholder expansion, M-RoPE positions, resizing arithmetic and patches, in NumPy alone.

E = tokens of the expanded stream (one placeholder per visual token), T = tokens of the compact stream (one per
image). A grid (t, h, w) counts the patches of one image; its visual tokens are t * h * w / merge_size**2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.weights.families import check_family

Grid = tuple[int, int, int]
MAX_ASPECT_RATIO = 200

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")  # the decoders that data from outside may reach
MAX_IMAGE_PIXELS = 1 << 26  # a file that claims more is refused before it is decoded


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """How a model looks at images; `min_pixels` and `max_pixels` bound an image's area after resizing."""

    image_token_id: int
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    banned_ids: tuple[int, ...] = ()  # the vision tokens, sorted: no policy may sample them
    position_side: int = 0  # of the square of learned positions; 0 = the tower has none, or the learner tells it
    window_tokens: int = 0  # visual tokens of a window's side; 0 = as above

    @staticmethod
    def load(model_dir: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None) -> VisionSpec:
        """From a model folder's config.json and preprocessor_config.json; ValueError if one is missing or unfit."""
        config = _read_json(Path(model_dir) / "config.json")
        check_family(model_dir, config)
        images = _read_json(Path(model_dir) / "preprocessor_config.json")
        if "vision_config" not in config or "image_token_id" not in config:
            raise ValueError(f"{model_dir} is not a vision-language model: config.json has no vision_config")
        size = images.get("size") or {}
        vision = config["vision_config"]
        return VisionSpec(
            image_token_id=config["image_token_id"],
            patch_size=vision["patch_size"],
            merge_size=vision["spatial_merge_size"],
            temporal_patch_size=vision["temporal_patch_size"],
            min_pixels=min_pixels or images.get("min_pixels") or size.get("shortest_edge") or 65536,
            max_pixels=max_pixels or images.get("max_pixels") or size.get("longest_edge") or 16777216,
            mean=tuple(images.get("image_mean") or (0.5, 0.5, 0.5)),
            std=tuple(images.get("image_std") or (0.5, 0.5, 0.5)),
            banned_ids=tuple(sorted({config[name] for name in _VISION_IDS if config.get(name) is not None})),
        )

    def grid(self, width: int, height: int) -> Grid:
        """The patch grid of an image of `width` × `height` pixels. ValueError if it is too narrow."""
        new_height, new_width = self.resized(width, height)
        return (1, new_height // self.patch_size, new_width // self.patch_size)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) to which the image is resized: multiples of a visual token, area within the bounds."""
        if min(width, height) < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ValueError(
                f"an image of {width}x{height} pixels: its sides may differ {MAX_ASPECT_RATIO}-fold at most"
            )
        unit = self.patch_size * self.merge_size
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
        """Visual tokens of one image."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2


_VISION_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def expand(
    token_ids: Sequence[int] | np.ndarray, grids_thw: Sequence[Grid], spec: VisionSpec
) -> tuple[np.ndarray, np.ndarray]:
    """(expanded_ids int64[E], compact_index int32[E]): each placeholder repeated once per visual token.

    `compact_index` gives every expanded position's place in the compact stream. ValueError if the number of
    placeholders is not the number of grids.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    places = np.flatnonzero(ids == spec.image_token_id)
    if len(places) != len(grids_thw):
        raise ValueError(f"{len(places)} image placeholders but {len(grids_thw)} images")
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = [spec.num_tokens(grid) for grid in grids_thw]
    compact_index = np.repeat(np.arange(len(ids), dtype=np.int32), repeats)
    return ids[compact_index], compact_index


def mrope_positions(expanded_ids: np.ndarray, grids_thw: Sequence[Grid], spec: VisionSpec) -> np.ndarray:
    """int64[3, E] positions (time, height, width) of the multimodal rotary embedding.

    Text advances all three axes by one per token; an image of h × w visual tokens spans its rows and columns from
    the position it starts at, and the next text follows after max(h, w).
    """
    ids = np.asarray(expanded_ids)
    positions = np.empty((3, len(ids)), dtype=np.int64)
    place = position = 0
    for at, (t, h, w) in zip(_image_starts(ids, grids_thw, spec), grids_thw, strict=True):
        positions[:, place:at] = np.arange(position, position + at - place)
        position += at - place
        rows, columns = h // spec.merge_size, w // spec.merge_size
        block = positions[:, at : at + t * rows * columns].reshape(3, t, rows, columns)
        block[0] = np.arange(position, position + t)[:, None, None]
        block[1] = np.arange(position, position + rows)[None, :, None]
        block[2] = np.arange(position, position + columns)[None, None, :]
        place = at + t * rows * columns
        position += max(rows, columns)
    positions[:, place:] = np.arange(position, position + len(ids) - place)
    return positions


def next_position(positions: np.ndarray) -> int:
    """The position of the token that follows int64[3, E] `positions`."""
    return int(positions.max()) + 1 if positions.size else 0


def _image_starts(ids: np.ndarray, grids: Sequence[Grid], spec: VisionSpec) -> list[int]:
    places = np.flatnonzero(ids == spec.image_token_id)
    sizes = [spec.num_tokens(grid) for grid in grids]
    if len(places) != sum(sizes):
        raise ValueError(f"{len(places)} visual tokens in the stream, but the images have {sum(sizes)}")
    return [int(places[offset]) for offset in np.cumsum([0, *sizes])[:-1]]


def patchify(rgb: np.ndarray, spec: VisionSpec) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [patches, 3, patch, patch], patches in merge-block order.

    H and W must be multiples of patch_size * merge_size (see `VisionSpec.resized`).
    """
    (height, width, _), patch, merge = rgb.shape, spec.patch_size, spec.merge_size
    blocks = rgb.reshape(height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, patch, patch)


def pixel_values(patches: np.ndarray, spec: VisionSpec) -> np.ndarray:
    """uint8 [patches, 3, patch, patch] -> float32 [patches, 3 * temporal * patch * patch], normalised.

    A still image fills the temporal patch with copies of itself, as the image processor does.
    """
    mean, std = (np.asarray(each, dtype=np.float32)[:, None, None] for each in (spec.mean, spec.std))
    values = (patches.astype(np.float32) * np.float32(1 / 255) - mean) / std
    values = np.repeat(values[:, :, None], spec.temporal_patch_size, axis=2)
    return values.reshape(len(patches), -1)


def _read_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a model's folder holds. ValueError, in one line, if it is no file that holds an object."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"no {path.name} in {path.parent}: give the folder of a Qwen-VL model") from None
    except NotADirectoryError:
        raise ValueError(f"{path.parent} is a file: give the folder of a Qwen-VL model") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a JSON object: it is no Qwen-VL model's")
    return found
