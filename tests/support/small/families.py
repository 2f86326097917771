"""Tiny random models of each family, made by transformers, in folders like those of published models. Sizes of matrices
differ, so that no matrix can be mistaken for its transpose.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Glm4vForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from launch.tiny_models.build import build_config, build_model, build_tokenizer, save
from shared.families.registry import FAMILIES as ALL
from tests.support.tiny import PHRASES, tiny_model_dir, tiny_tokenizer

NUM_EXPERTS, EXPERT_SIZE = 6, 24  # beside a hidden size of 64 or 128


def qwen25(folder: Path) -> Path:
    """Write a tiny Qwen2.5-VL: patches of 14, windows of 2 x 2 visual tokens in all blocks but the last, no deepstack;
    the tower's hidden layer is no multiple of 8, as in the published models, and config.json has their form."""
    token = tiny_tokenizer().convert_tokens_to_ids
    text = {
        "vocab_size": 640,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "initializer_range": 0.12,
        "bos_token_id": None,
        "eos_token_id": token("<|im_end|>"),
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_heads": 2,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [2],
        "out_hidden_size": 64,
        "initializer_range": 0.18,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases of 0 and norms of 1 would hide mistakes
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    _flatten(folder / "config.json")
    clip = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    Qwen2VLImageProcessorPil(patch_size=14, min_pixels=3136, max_pixels=1 << 20, **clip).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _flatten(file: Path) -> None:
    """Rewrite config.json in the older form: the text model's fields are at the top level, with rope_scaling and
    rope_theta."""
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    vision = config.pop("vision_config") | {"in_chans": 3, "spatial_patch_size": 14}
    for name in ("model_type", "rope_parameters", "in_channels"):
        vision.pop(name, None)
    flat = {name: text[name] for name in text if name not in ("model_type", "dtype", "layer_types")}
    config.pop("dtype")
    file.write_text(json.dumps(flat | config | {"torch_dtype": "float32", "vision_config": vision}, indent=2))


def qwen3_moe(folder: Path) -> Path:
    """Write a tiny Qwen3-VL with experts in each layer."""
    return as_mixture(tiny_model_dir(folder), folder / "mixture")


def as_mixture(dense: Path, folder: Path) -> Path:
    """Write a random model with the shape of the one in `dense` but experts in each layer, and copies of its other
    files."""
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((dense / "config.json").read_text())
    text = config["text_config"] | {"model_type": "qwen3_vl_moe_text", "num_experts": NUM_EXPERTS}
    text |= {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_SIZE}
    text |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "initializer_range": 0.1}
    vision = config["vision_config"] | {"model_type": "qwen3_vl_moe_vision"}
    ids = {name: config[name] for name in config if name.endswith("token_id")}
    torch.manual_seed(1)
    moe = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids))
    moe.save_pretrained(folder)
    return folder


@torch.no_grad()
def shift_norms(model: torch.nn.Module) -> None:
    """Add noise to the weights of norms: those of 1 would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.1 * torch.randn(parameter.shape)


def qwen3_5(folder: Path) -> Path:
    """Write a tiny Qwen3.5: one delta net, with half as many heads of keys as of values, and one layer that attends."""
    config = build_config(tiny_tokenizer(), hidden=128, layers=2, vision_hidden=32, vision_depth=2, family="qwen3_5")
    config.text_config.linear_value_head_dim = 24
    model = build_model(config, seed=1)
    shift_norms(model)
    save(folder / "recurrent", model, tiny_tokenizer())
    return folder / "recurrent"


def qwen3_5_moe(folder: Path) -> Path:
    """Write a tiny Qwen3.5 with experts in each layer, two of six for each token, and a shared one."""
    dense = json.loads((qwen3_5(folder) / "config.json").read_text())
    text = dense["text_config"] | {"model_type": "qwen3_5_moe_text", "num_experts": NUM_EXPERTS}
    text |= {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_SIZE, "shared_expert_intermediate_size": 40}
    text.pop("intermediate_size")
    vision = dense["vision_config"] | {"model_type": "qwen3_5_moe_vision"}
    ids = {name: dense[name] for name in dense if name.endswith("token_id")}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    model = build_model(config, seed=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # routers of zeros would take the same experts for all tokens
                parameter.normal_()
    save(folder / "recurrent_moe", model, tiny_tokenizer())
    # Stacks, as the published checkpoints have them: transformers writes each expert's matrices.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "recurrent_moe" / "model.safetensors", metadata={"format": "pt"})
    return folder / "recurrent_moe"


def qwen3(folder: Path) -> Path:
    """Write a tiny Qwen3, which takes no images."""
    config = build_config(tiny_tokenizer(), hidden=64, layers=2, family="qwen3")
    model = build_model(config, seed=1)
    shift_norms(model)
    save(folder / "text", model, tiny_tokenizer())
    return folder / "text"


def glm4v(folder: Path) -> Path:
    """Write a tiny GLM-4V."""
    return with_own_tokenizer("glm4v", folder / "glm")


def with_own_tokenizer(model_type: str, folder: Path) -> Path:
    """Write a tiny model of a family with a tokenizer of its own."""
    tokens = ALL[model_type].small_tokenizer
    assert tokens is not None
    tokenizer = build_tokenizer(PHRASES, 640, tokens=tokens)
    model = build_model(build_config(tokenizer, hidden=64, layers=2, vision_hidden=32, family=model_type), seed=1)
    shift_norms(model)
    save(folder, model, tokenizer)
    return folder


FAMILIES: dict[str, tuple[Callable[[Path], Path], type, tuple[int, ...]]] = {
    "GLM-4V": (glm4v, Glm4vForConditionalGeneration, (64, 96)),
    "Qwen2.5-VL": (qwen25, Qwen2_5_VLForConditionalGeneration, (56, 84, 140)),
    "Qwen3": (qwen3, Qwen3ForCausalLM, ()),
    "Qwen3.5": (qwen3_5, Qwen3_5ForConditionalGeneration, (64, 96)),
    "Qwen3.5-MoE": (qwen3_5_moe, Qwen3_5MoeForConditionalGeneration, (64, 96)),
    "Qwen3-VL": (tiny_model_dir, Qwen3VLForConditionalGeneration, (64, 96)),
    "Qwen3-VL-MoE": (qwen3_moe, Qwen3VLMoeForConditionalGeneration, (64, 96)),
}
"""How a model is made, its class in transformers, sides of images that are not resized; () = it takes no images."""
