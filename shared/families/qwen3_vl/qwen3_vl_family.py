"""The families Qwen3-VL and Qwen3-VL-MoE: one has dense layers and one a mixture of experts; their towers are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from shared.families.model_family import PublishedModel
from shared.families.model_sizes import ModelSizes
from shared.families.qwen_vl import QwenVL

if TYPE_CHECKING:
    from shared.families.engine_tower import VisionTower

VARIANTS = ("Instruct", "Thinking")
SMALL_TOWER = {"vision_depth": 24, "vision_hidden": 1024, "vision_intermediate": 4096}
LARGE_TOWER = {"vision_depth": 27, "vision_hidden": 1152, "vision_intermediate": 4304}


def _published(tower: dict[str, int], **fields: int) -> PublishedModel:
    """Return a published model. Those with the small tower have tied embeddings."""
    common: dict[str, Any] = {
        "vocab_size": 151936,
        "head_dim": 128,
        "max_context": 262144,
        "tied": tower is SMALL_TOWER,
        "vision_full_blocks": tower["vision_depth"],
        "vision_positions": 2304,
        "patch_values": 3 * 2 * 16 * 16,
        "merge": 4,
        "num_deepstack": 3,
    }
    return PublishedModel("Qwen", VARIANTS, ModelSizes(**common | tower | fields))


def _dense(
    hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int, tower: dict[str, int]
) -> PublishedModel:
    return _published(
        tower,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        intermediate_size=intermediate_size,
    )


def _mixture(hidden_size: int, num_layers: int, num_heads: int, expert_size: int) -> PublishedModel:
    return _published(
        LARGE_TOWER,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=0,
        num_heads=num_heads,
        num_kv_heads=4,
        num_experts=128,
        experts_per_token=8,
        expert_size=expert_size,
    )


class Qwen3VL(QwenVL):
    """Qwen3-VL: queries and keys are normed; the tower has LayerNorms and learned positions, and its features are also
    added in layers of the decoder (deepstack)."""

    title = "Qwen3-VL"
    model_type = "qwen3_vl"
    published: ClassVar = {
        "Qwen3-VL-2B": _dense(2048, 28, 16, 6144, SMALL_TOWER),
        "Qwen3-VL-4B": _dense(2560, 36, 32, 9728, SMALL_TOWER),
        "Qwen3-VL-8B": _dense(4096, 36, 32, 12288, LARGE_TOWER),
        "Qwen3-VL-32B": _dense(5120, 64, 64, 25600, LARGE_TOWER),
    }

    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes in config.json; see `ModelFamily`."""
        vision = config["vision_config"]
        return ModelSizes(
            **self.common_sizes(config),
            vision_full_blocks=vision["depth"],
            vision_positions=vision.get("num_position_embeddings", 0),
            num_deepstack=len(vision.get("deepstack_visual_indexes", ())),
        )

    def engine_tower(self, visual: Any, mean: Sequence[float], std: Sequence[float]) -> VisionTower[Any]:
        """Return a `Qwen3Tower`; see `ModelFamily`."""
        from shared.families.qwen3_vl.qwen3_tower import Qwen3Tower

        return Qwen3Tower(visual, mean, std)


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL whose layers have experts, stored as stacks of matrices."""

    title = "Qwen3-VL-MoE"
    model_type = "qwen3_vl_moe"
    transposed = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    published: ClassVar = {
        "Qwen3-VL-30B-A3B": _mixture(2048, 48, 32, 768),
        "Qwen3-VL-235B-A22B": _mixture(4096, 94, 64, 1536),
    }
