"""The family Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from shared.families.model_family import PublishedModel
from shared.families.model_sizes import ModelSizes
from shared.families.qwen_vl import QwenVL

if TYPE_CHECKING:
    from shared.families.engine_tower import VisionTower

PARTS: dict[str, Any] = {
    "qk_norm": False,
    "attention_bias": True,
    "vision_gated_mlp": True,
    "vision_rms_norm": True,
    "vision_patch_bias": False,
}
"""What all models of the family have, as `ModelSizes` names it."""


def _published(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vision_intermediate: int,
    tied: bool = False,
) -> PublishedModel:
    sizes = ModelSizes(
        **PARTS,
        vocab_size=151936 if tied else 152064,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        intermediate_size=intermediate_size,
        tied=tied,
        max_context=128000,
        vision_depth=32,
        vision_hidden=1280,
        vision_intermediate=vision_intermediate,
        vision_full_blocks=4,
        window_patches=64,
        patch_values=3 * 2 * 14 * 14,
        merge=4,
    )
    return PublishedModel("Qwen", ("Instruct",), sizes)


class Qwen25VL(QwenVL):
    """Qwen2.5-VL: queries and keys have biases and no norms; the tower has RMSNorms, gated MLPs and no learned
    positions, and most of its blocks attend within windows. Published checkpoints have the parameter names of an
    earlier version of transformers."""

    title = "Qwen2.5-VL"
    model_type = "qwen2_5_vl"
    prefixes = (("model.language_model.", "model."), ("model.visual.", "visual."))
    published: ClassVar = {
        "Qwen2.5-VL-3B": _published(2048, 36, 16, 2, 11008, 3420, tied=True),
        "Qwen2.5-VL-7B": _published(3584, 28, 28, 4, 18944, 3420),
        "Qwen2.5-VL-32B": _published(5120, 64, 40, 8, 27648, 3456),
        "Qwen2.5-VL-72B": _published(8192, 80, 64, 8, 29568, 3456),
    }

    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes in config.json; see `ModelFamily`."""
        vision = config["vision_config"]
        return ModelSizes(
            **self.common_sizes(config),
            **PARTS,
            vision_full_blocks=len(vision.get("fullatt_block_indexes", ())),
            window_patches=(vision.get("window_size", 0) // vision["patch_size"]) ** 2,
        )

    def engine_tower(self, visual: Any, mean: Sequence[float], std: Sequence[float]) -> VisionTower[Any]:
        """Return a `Qwen25Tower`; see `ModelFamily`."""
        from shared.families.qwen2_5_vl.qwen2_5_tower import Qwen25Tower

        return Qwen25Tower(visual, mean, std)
