"""Builds a small model: a family's real classes with a small config, and a byte-level BPE tokenizer with the family's
special tokens and chat layout. 1.4 M parameters for Sokoban, 0.3 and 1.3 M for geometry, 0.2 M for the colour task; all
run on a laptop's CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3Config,
    Qwen3VLConfig,
)
from transformers.utils.logging import disable_progress_bar

from shared.families.marks import CALL, THOUGHT
from shared.families.model_family import ModelFamily, SmallTokenizer
from shared.families.model_sizes import ModelSizes
from shared.families.registry import FAMILIES

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (CALL.opening, CALL.closing, THOUGHT.opening, THOUGHT.closing)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for item in message.content -%}"
    "{%- if item.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif item.type == 'text' -%}{{- item.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

QWEN = SmallTokenizer(SPECIAL_TOKENS, PLAIN_ADDED_TOKENS, CHAT_TEMPLATE)
TOOLS_TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\nTools:' -}}"
    "{%- for tool in tools -%}{{- ' ' + tool.function.name -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}"
) + CHAT_TEMPLATE
"""The same for models with tools, which are told of by their names."""


def build_tokenizer(
    phrases: list[str], vocab_size: int = 640, chat_template: str = "", tokens: SmallTokenizer = QWEN
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE whose merges span whole phrases, so that a fixed sentence of a task is one or two tokens.

    `phrases` are the task's recurring texts; any other text can still be encoded, byte by byte. `tokens`: the family's;
    `chat_template`: another one.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tokens.special) - len(tokens.plain),
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=256,
    )
    bpe.train_from_iterator(phrases, trainer)
    bpe.add_special_tokens(list(tokens.special))
    bpe.add_tokens(list(tokens.plain))
    end = "<|im_end|>" if tokens is QWEN else tokens.special[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=end,
        pad_token=tokens.special[0],
        chat_template=chat_template or tokens.chat_template,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[t for t in tokens.special if t not in (end, tokens.special[0])],
    )


def build_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 128,
    layers: int = 4,
    vision_hidden: int = 64,
    vision_depth: int = 2,
    vocab_size: int = 640,
    family: str = "qwen3_vl",
) -> PreTrainedConfig:
    """Return the config of a small model of a `family`, given by its model_type: qwen3_vl, qwen3_5, qwen3 for a text
    model, or one with a tokenizer of its own. `hidden` must be a multiple of 64 (heads of size 32)."""
    if FAMILIES[family].small_tokenizer is not None:
        return _example(FAMILIES[family], tokenizer, hidden, layers, vision_hidden, vision_depth, vocab_size)
    heads, ids = hidden // 32, tokenizer.get_vocab()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    text = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": hidden**-0.5,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    if family == "qwen3":
        return Qwen3Config(**text, rope_parameters=rope)
    vision = {
        "depth": vision_depth,
        "hidden_size": vision_hidden,
        "intermediate_size": 2 * vision_hidden,
        "num_heads": max(1, vision_hidden // 16),
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 256,
        "initializer_range": vision_hidden**-0.5,
    }
    named: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    if family == "qwen3_5":
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
        text |= {"rope_parameters": rope, "layer_types": _layer_types(layers), "linear_conv_kernel_dim": 4}
        text |= {"linear_num_key_heads": heads // 2, "linear_num_value_heads": heads}
        text |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        vision["deepstack_visual_indexes"] = []
        config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **named)
        # As published, and as SGLang reads it; transformers reads layer_types.
        vars(config.text_config)["full_attention_interval"] = min(4, layers)
        return config
    return Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope | {"mrope_section": [8, 4, 4], "mrope_interleaved": True}},
        vision_config=vision | {"deepstack_visual_indexes": list(range(vision_depth))},
        tie_word_embeddings=True,
        **named,
    )


def _example(
    family: ModelFamily,
    tokenizer: PreTrainedTokenizerFast,
    hidden: int,
    layers: int,
    vision_hidden: int,
    vision_depth: int,
    vocab_size: int,
) -> PreTrainedConfig:
    """Return the family's example of a config."""
    sizes = ModelSizes(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_dense_layers=layers,
        num_heads=hidden // 32,
        num_kv_heads=hidden // 64,
        head_dim=32,
        intermediate_size=3 * hidden,
        tied=False,
        max_context=4096,
        vision_depth=vision_depth,
        vision_hidden=vision_hidden,
        vision_positions=256,
        patch_values=3 * 2 * 16 * 16,
        merge=4,
        merger_size=2 * hidden,
    )
    config = AutoConfig.for_model(family.model_type, **family.example(sizes, tokenizer.get_vocab()))
    config.text_config.initializer_range, config.vision_config.initializer_range = hidden**-0.5, vision_hidden**-0.5
    return config


def _layer_types(layers: int) -> list[str]:
    """Return the kinds of Qwen3.5's layers: every fourth attends, and the last."""
    return ["full_attention" if (i + 1) % 4 == 0 or i == layers - 1 else "linear_attention" for i in range(layers)]


def build_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, FAMILIES[config.model_type].auto_class).from_config(config)
    return model


def save(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a model folder as on the hub: config, safetensors, tokenizer with chat template, and of a vision-language
    model the image processor."""
    disable_progress_bar()
    folder = Path(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    family = FAMILIES[model.config.model_type]
    if family.takes_images:
        half = [0.5, 0.5, 0.5]
        size = {"shortest_edge": 1024 * family.bounded_frames, "longest_edge": 1048576 * family.bounded_frames}
        getattr(transformers, family.image_processor)(
            patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=half, image_std=half, size=size
        ).save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in family.ends_of_turn]
    others = [number for number in ends if number != tokenizer.eos_token_id]
    eos = [tokenizer.eos_token_id, *others] if others else tokenizer.eos_token_id
    generation = {"eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
