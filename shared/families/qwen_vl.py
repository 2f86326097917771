"""The common part of the families of Qwen's vision-language models."""

from __future__ import annotations

from shared.families.mrope_family import MRopeFamily


class QwenVL(MRopeFamily):
    """A family with ChatML turns and Qwen's tokens for images."""

    ends_of_turn = ("<|im_end|>",)
    other_ends = ("<|endoftext|>",)
    image_placeholder = "<|image_pad|>"
    image_ids = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    other_ids = ("video_token_id",)
    pixel_bounds = (65536, 16777216)
