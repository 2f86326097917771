"""Configurations, and folders with random weights, in the sizes of the published models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from launch.tiny_models.build import build_tokenizer, save
from shared.families.registry import FAMILIES, PUBLISHED
from tests.support.tiny import PHRASES

IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def published_config(name: str, ids: Mapping[str, int] | None = None) -> PreTrainedConfig:
    """Return transformers' config of a published model, with the sizes from shared/families. `ids` are token ids by the
    config's names."""
    sizes = PUBLISHED[name]
    family = next((each for each in FAMILIES.values() if name in each.published), None)
    if family is not None and family.small_tokenizer is not None:
        return AutoConfig.for_model(family.model_type, **family.example(sizes, ids or {}))
    text = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "moe_intermediate_size": sizes.expert_size,
        "max_position_embeddings": sizes.max_context,
    }
    more = {"tie_word_embeddings": sizes.tied, **(ids or {})}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    if not sizes.vision_depth:
        return Qwen3Config(**text, **more, rope_parameters=rope)
    vision = {
        "depth": sizes.vision_depth,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": sizes.vision_intermediate,
        "out_hidden_size": sizes.hidden_size,
    }
    if sizes.vision_rms_norm:
        text["rope_parameters"] = rope | {"mrope_section": [16, 24, 24]}
        vision["fullatt_block_indexes"] = [7, 15, 23, 31]
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **more)
    if sizes.num_linear_layers:
        text |= {
            "linear_num_key_heads": sizes.linear_key_heads,
            "linear_num_value_heads": sizes.linear_value_heads,
            "linear_key_head_dim": sizes.linear_key_dim,
            "linear_value_head_dim": sizes.linear_value_dim,
            "linear_conv_kernel_dim": sizes.conv_taps,
        }
        text["rope_parameters"] = rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
        vision["num_position_embeddings"] = sizes.vision_positions
        if sizes.num_experts:
            text["shared_expert_intermediate_size"] = sizes.shared_expert_size
            text.pop("intermediate_size")
            return Qwen3_5MoeConfig(text_config=text, vision_config=vision, **more)
        return Qwen3_5Config(text_config=text, vision_config=vision, **more)
    text["rope_parameters"] = rope | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    vision |= {
        "num_position_embeddings": sizes.vision_positions,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    kind = Qwen3VLMoeConfig if sizes.num_experts else Qwen3VLConfig
    return kind(text_config=text, vision_config=vision, **more)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class that makes the model of this config."""
    return getattr(transformers, FAMILIES[config.model_type].auto_class)


def save_random(name: str, folder: str | Path) -> None:
    """Write a model with this published model's sizes, random bfloat16 weights, and the small models' tokenizer, whose
    tokens are the first few hundred of the vocabulary."""
    tokenizer = build_tokenizer(PHRASES)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in IDS.items()}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = published_config(name, ids)
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    save(folder, model, tokenizer)
