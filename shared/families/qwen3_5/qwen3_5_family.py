"""The families Qwen3.5 and Qwen3.5-MoE: three of four layers are gated delta nets, the fourth attends with a gate."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from shared.families.model_family import PublishedModel
from shared.families.model_sizes import ModelSizes
from shared.families.qwen_vl import QwenVL

if TYPE_CHECKING:
    from shared.families.engine_tower import VisionTower

PARTS: dict[str, Any] = {"attention_gate": True}
"""What all models of the family have, as `ModelSizes` names it."""
TOWERS = {
    12: {"vision_depth": 12, "vision_hidden": 768, "vision_intermediate": 3072},
    24: {"vision_depth": 24, "vision_hidden": 1024, "vision_intermediate": 4096},
    27: {"vision_depth": 27, "vision_hidden": 1152, "vision_intermediate": 4304},
}
"""By the number of blocks."""


def _published(tower: int, *, num_layers: int, value_heads: int, tied: bool = False, **fields: int) -> PublishedModel:
    common: dict[str, Any] = {
        "vocab_size": 248320,
        "head_dim": 256,
        "max_context": 262144,
        "num_linear_layers": num_layers * 3 // 4,
        "linear_key_heads": 16,
        "linear_value_heads": value_heads,
        "linear_key_dim": 128,
        "linear_value_dim": 128,
        "conv_taps": 4,
        "vision_full_blocks": TOWERS[tower]["vision_depth"],
        "vision_positions": 2304,
        "patch_values": 3 * 2 * 16 * 16,
        "merge": 4,
    }
    sizes = ModelSizes(**PARTS | common | TOWERS[tower] | fields, num_layers=num_layers, tied=tied)
    return PublishedModel("Qwen", ("", "Base"), sizes)


def _dense(
    tower: int, hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate_size: int,
    value_heads: int, *, tied: bool = False,
) -> PublishedModel:  # fmt: skip
    return _published(
        tower,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        value_heads=value_heads,
        tied=tied,
    )


def _mixture(
    hidden_size: int, num_layers: int, num_heads: int, value_heads: int, num_experts: int, chosen: int, expert_size: int
) -> PublishedModel:
    return _published(
        27,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=0,
        num_heads=num_heads,
        num_kv_heads=2,
        value_heads=value_heads,
        num_experts=num_experts,
        experts_per_token=chosen,
        expert_size=expert_size,
        shared_expert_size=expert_size,
    )


class Qwen35(QwenVL):
    """Qwen3.5: norms multiply by 1 + weight, a quarter of each head is rotated; the tower is that of Qwen3-VL without
    deepstack. Checkpoints also hold layers that predict further tokens (mtp), which are neither trained nor sent."""

    title = "Qwen3.5"
    model_type = "qwen3_5"
    norm_offset = 1.0
    is_recurrent = True
    ignored = re.compile(r"^mtp\.")
    published: ClassVar = {
        "Qwen3.5-0.8B": _dense(12, 1024, 24, 8, 2, 3584, 16, tied=True),
        "Qwen3.5-2B": _dense(24, 2048, 24, 8, 2, 6144, 16, tied=True),
        "Qwen3.5-4B": _dense(24, 2560, 32, 16, 4, 9216, 32, tied=True),
        "Qwen3.5-9B": _dense(27, 4096, 32, 16, 4, 12288, 32),
        "Qwen3.5-27B": _dense(27, 5120, 64, 24, 4, 17408, 48),
    }

    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes in config.json; see `ModelFamily`."""
        text, vision = self.text_config(config), config["vision_config"]
        every = text.get("full_attention_interval") or 4
        kinds = text.get("layer_types") or [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(text["num_hidden_layers"])
        ]
        return ModelSizes(
            **self.common_sizes(config),
            **PARTS,
            num_linear_layers=kinds.count("linear_attention"),
            linear_key_heads=text["linear_num_key_heads"],
            linear_value_heads=text["linear_num_value_heads"],
            linear_key_dim=text["linear_key_head_dim"],
            linear_value_dim=text["linear_value_head_dim"],
            conv_taps=text["linear_conv_kernel_dim"],
            vision_full_blocks=vision["depth"],
            vision_positions=vision.get("num_position_embeddings", 0),
        )

    def lora_targets(self) -> Mapping[str, re.Pattern[str]]:
        """Return the patterns; those of attention are also the wide linear layers of delta nets."""
        layer = rf"^{re.escape(self.decoder_path)}\.layers\.\d+\."
        mixers = re.compile(layer + r"(self_attn\.\w+|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))$")
        return {**super().lora_targets(), "attention": mixers}

    def engine_tower(self, visual: Any, mean: Sequence[float], std: Sequence[float]) -> VisionTower[Any]:
        """Return Qwen3-VL's tower; see `ModelFamily`."""
        from shared.families.qwen3_vl.qwen3_tower import Qwen3Tower

        return Qwen3Tower(visual, mean, std)


class Qwen35Moe(Qwen35):
    """Qwen3.5 whose layers have experts, stored as stacks of matrices as transformers holds them, and one expert that
    every token uses."""

    title = "Qwen3.5-MoE"
    model_type = "qwen3_5_moe"
    published: ClassVar = {
        "Qwen3.5-35B-A3B": _mixture(2048, 40, 16, 32, 256, 8, 512),
        "Qwen3.5-122B-A10B": _mixture(3072, 48, 32, 64, 256, 8, 1024),
        "Qwen3.5-397B-A17B": _mixture(4096, 60, 32, 64, 512, 10, 1024),
    }

    def lora_targets(self) -> Mapping[str, re.Pattern[str]]:
        """Return the patterns; the dense layers are those of the shared experts."""
        shared = re.compile(rf"^{re.escape(self.decoder_path)}\.layers\.\d+\.mlp\.shared_expert\.\w+$")
        return {**super().lora_targets(), "dense": shared}
