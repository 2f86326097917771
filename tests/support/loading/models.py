"""Random models of each family, written into one or several files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from launch.tiny_models.build import build_config, build_model, save
from shared.families.registry import family_in
from tests.support.tiny import tiny_model_dir, tiny_tokenizer

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def dense(tmp: Path) -> Path:
    """Write a Qwen3-VL; the output head is the embeddings."""
    return tiny_model_dir(tmp)


def experts(tmp: Path, *, hidden: int = 64, expert: int = 40, number: int = 6, vocab_size: int = 640) -> Path:
    """Write a Qwen3-VL-MoE with files like the published ones. Hidden size, experts' size and number of experts all
    differ."""
    start = tiny_model_dir(tmp)
    config = json.loads((start / "config.json").read_text())
    text = config["text_config"] | {"model_type": "qwen3_vl_moe_text", "num_experts": number, "num_experts_per_tok": 2}
    text |= {"moe_intermediate_size": expert, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_size": hidden}
    text |= {"vocab_size": vocab_size}
    vision = config["vision_config"] | {"model_type": "qwen3_vl_moe_vision", "out_hidden_size": hidden}
    ids = {name: config[name] for name in TOKENS}
    kind = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(kind)
    model.config.save_pretrained(start)
    return rewrite(start, {name: random(name, p) for name, p in model.named_parameters()}, files=2)


def random(name: str, parameter: Tensor) -> Tensor:
    """Return random weights for a parameter in bfloat16 and in the published layout."""
    values = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(std=0.1)
    return values.mT.contiguous() if "mlp.experts." in name else values


def qwen25(tmp: Path) -> Path:
    """Write a Qwen2.5-VL, with the names of the published ones."""
    ids = {name: tiny_tokenizer().convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14}
    vision |= {"window_size": 56, "fullatt_block_indexes": [2], "out_hidden_size": 64}
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    tmp.mkdir(exist_ok=True)
    model.config.save_pretrained(tmp)
    own, published = ("model.language_model.", "model.visual."), ("model.", "visual.")
    rewrite(
        tmp, {n.replace(own[0], published[0]).replace(own[1], published[1]): p for n, p in model.named_parameters()}
    )
    Qwen2VLImageProcessorPil(patch_size=14, min_pixels=3136, max_pixels=1 << 20).save_pretrained(tmp)
    return tmp


def text(tmp: Path) -> Path:
    """Write a Qwen3 in two files; the output head is no embeddings."""
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, rope_parameters=rope, tie_word_embeddings=False))
    tmp.mkdir(exist_ok=True)
    model.config.save_pretrained(tmp)
    return rewrite(tmp, dict(model.named_parameters()), files=2)


def recurrent(tmp: Path) -> Path:
    """Write a Qwen3.5 with a tensor that predicts further tokens, as the published ones have; its layers are three
    delta nets and one that attends."""
    config = build_config(tiny_tokenizer(), hidden=64, layers=4, vision_hidden=32, family="qwen3_5")
    save(tmp, build_model(config), tiny_tokenizer())
    return rewrite(tmp, tensors(tmp) | {"mtp.norm.weight": torch.ones(64)}, files=2)


FAMILIES = {"Qwen3-VL": dense, "Qwen3-VL-MoE": experts, "Qwen2.5-VL": qwen25, "Qwen3": text, "Qwen3.5": recurrent}


def auto_class(folder: str | Path) -> Any:
    """Return transformers' class that loads the model in a folder."""
    return getattr(transformers, family_in(folder).auto_class)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return copies of all tensors in a folder, since the files may be rewritten."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor.clone() for file in files for name, tensor in file.items()}


def rewrite(folder: Path, weights: Mapping[str, Tensor], *, files: int = 1) -> Path:
    """Write these weights and no others into the folder's files; several have an index."""
    copies = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if files == 1:
        save_file(copies, folder / WHOLE, metadata={"format": "pt"})
        return folder
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for number in range(files):
        name, part = f"model-{number + 1:05d}-of-{files:05d}.safetensors", sorted(copies)[number::files]
        save_file({key: copies[key] for key in part}, folder / name, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps(index))
    return folder
