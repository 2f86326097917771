"""A mixture of experts that computes what a dense model does: each expert is a copy of its layer's MLP."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from tests.support.tiny import load_model


@torch.no_grad()
def upcycled(dense: str | Path, folder: Path, *, num_experts: int = 4, chosen: int = 2) -> Path:
    """Writes the mixture made of the Qwen3-VL in `dense`; routers are random (Komatsuzaki et al., 2023, "Sparse
    Upcycling"). Weights of the chosen experts sum to 1, so that any choice gives the MLP's own output."""
    source = load_model(dense)
    config = Qwen3VLMoeConfig.from_dict(source.config.to_dict())
    config.model_type, text = "qwen3_vl_moe", config.text_config
    text.num_experts, text.num_experts_per_tok = num_experts, chosen
    text.moe_intermediate_size = source.config.text_config.intermediate_size
    torch.manual_seed(0)
    mixture = Qwen3VLMoeForConditionalGeneration(config)
    weights = {name: p for name, p in source.state_dict().items() if ".mlp." not in name or "visual" in name}
    for index, layer in enumerate(source.model.language_model.layers):
        stem, mlp = f"model.language_model.layers.{index}.mlp", layer.mlp
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        weights[f"{stem}.experts.gate_up_proj"] = gate_up.expand(num_experts, -1, -1)
        weights[f"{stem}.experts.down_proj"] = mlp.down_proj.weight.expand(num_experts, -1, -1)
        weights[f"{stem}.gate.weight"] = torch.randn(num_experts, text.hidden_size) / text.hidden_size**0.5
    mixture.load_state_dict(weights)
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    mixture.save_pretrained(folder)
    return folder
