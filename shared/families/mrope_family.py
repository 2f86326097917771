"""The common part of the families whose images are grids of patches, and whose tokens have positions in three axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from shared.families.model_family import ModelFamily
from shared.families.mrope import Grid, mrope_positions


class MRopeFamily(ModelFamily):
    """A family with M-RoPE positions and three tokens for each image: start, placeholder, end.

    `image_ids`: the names of these three in config.json; `other_ids`: those of further tokens that no policy may
    sample. `pixel_bounds`: the least and most pixels of a config without them.
    """

    image_ids: ClassVar[tuple[str, str, str]]
    other_ids: ClassVar[tuple[str, ...]]
    pixel_bounds: ClassVar[tuple[int, int]]
    decoder_path = "model.language_model"
    tower_path = "model.visual"

    def vision_fields(self, config: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `VisionSpec`; see `ModelFamily`. All vision tokens are banned: no policy may sample one."""
        if "vision_config" not in config or "image_token_id" not in config:
            raise ValueError("config.json has no vision_config or no image_token_id")
        size = images.get("size") or {}
        vision, (least, most) = config["vision_config"], self.pixel_bounds
        named = (config.get(name) for name in (*self.image_ids, *self.other_ids))
        return {
            "image_token_id": config["image_token_id"],
            "patch_size": vision["patch_size"],
            "merge_size": vision["spatial_merge_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "min_pixels": (images.get("min_pixels") or size.get("shortest_edge") or least) // self.bounded_frames,
            "max_pixels": (images.get("max_pixels") or size.get("longest_edge") or most) // self.bounded_frames,
            "mean": tuple(images.get("image_mean") or (0.5, 0.5, 0.5)),
            "std": tuple(images.get("image_std") or (0.5, 0.5, 0.5)),
            "banned_ids": tuple(sorted({number for number in named if number is not None})),
        }

    def image_block(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the ids of the start, the placeholder and the end."""
        return tuple(config[name] for name in self.image_ids)

    def position_ids(
        self, expanded_ids: np.ndarray, grids: Sequence[Grid], *, image_token_id: int, merge_size: int
    ) -> np.ndarray:
        """Return M-RoPE's positions; see `ModelFamily`."""
        return mrope_positions(expanded_ids, grids, image_token_id=image_token_id, merge_size=merge_size)

    def common_sizes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `ModelSizes` that all these families read from the same keys."""
        vision = config["vision_config"]
        return self.text_sizes(config) | {
            "vision_depth": vision["depth"],
            "vision_hidden": vision["hidden_size"],
            "vision_intermediate": vision["intermediate_size"],
            "patch_values": 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
            "merge": vision["spatial_merge_size"] ** 2,
        }
