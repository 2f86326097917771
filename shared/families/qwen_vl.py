"""The common part of the families of Qwen's vision-language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shared.families.model_family import ModelFamily
from shared.families.mrope import Grid, mrope_positions

VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class QwenVL(ModelFamily):
    """A family with ChatML turns, M-RoPE positions, and three tokens for each image: start, placeholder, end."""

    ends_of_turn = ("<|im_end|>",)
    other_ends = ("<|endoftext|>",)
    image_placeholder = "<|image_pad|>"
    decoder_path = "model.language_model"
    tower_path = "model.visual"

    def vision_fields(self, config: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `VisionSpec`; see `ModelFamily`. All vision tokens are banned: no policy may sample one."""
        if "vision_config" not in config or "image_token_id" not in config:
            raise ValueError("config.json has no vision_config or no image_token_id")
        size = images.get("size") or {}
        vision = config["vision_config"]
        return {
            "image_token_id": config["image_token_id"],
            "patch_size": vision["patch_size"],
            "merge_size": vision["spatial_merge_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "min_pixels": images.get("min_pixels") or size.get("shortest_edge") or 65536,
            "max_pixels": images.get("max_pixels") or size.get("longest_edge") or 16777216,
            "mean": tuple(images.get("image_mean") or (0.5, 0.5, 0.5)),
            "std": tuple(images.get("image_std") or (0.5, 0.5, 0.5)),
            "banned_ids": tuple(sorted({config[name] for name in VISION_TOKENS if config.get(name) is not None})),
        }

    def image_block(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the ids of the start, the placeholder and the end."""
        return config["vision_start_token_id"], config["image_token_id"], config["vision_end_token_id"]

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
