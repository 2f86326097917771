"""The family of GLM-4.1V and GLM-4.6V-Flash, of Z.ai."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar

from shared.families.glm4v.glm4v_template import CHAT_TEMPLATE
from shared.families.marks import CALL, THOUGHT
from shared.families.model_family import PublishedModel, SmallTokenizer
from shared.families.model_sizes import ModelSizes
from shared.families.mrope_family import MRopeFamily

if TYPE_CHECKING:
    from shared.families.engine_tower import VisionTower

PARTS: dict[str, Any] = {
    "layer_norms": 4,
    "fused_mlp": True,
    "qk_norm": False,
    "attention_bias": True,
    "vision_gated_mlp": True,
    "vision_rms_norm": True,
    "vision_bias": False,
}
"""What all models of the family have, as `ModelSizes` names it."""
SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
)
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
RESPONSE = ("<tool_response>", "</tool_response>")


def _published(max_context: int) -> PublishedModel:
    sizes = ModelSizes(
        **PARTS,
        vocab_size=151552,
        hidden_size=4096,
        num_layers=40,
        num_dense_layers=40,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=13696,
        tied=False,
        max_context=max_context,
        vision_depth=24,
        vision_hidden=1536,
        vision_intermediate=4096,
        vision_full_blocks=24,
        vision_positions=576,
        patch_values=3 * 2 * 14 * 14,
        merge=4,
        merger_size=13696,
    )
    return PublishedModel("zai-org", ("",), sizes)


class Glm4v(MRopeFamily):
    """GLM-4.1V and GLM-4.6V-Flash: a decoder layer norms also what its attention and its MLP add; half of each head is
    rotated, by neighbouring pairs. A turn of the model ends with the token that begins the next one. The tower has
    RMSNorms and gated MLPs without biases."""

    title = "GLM-4V"
    model_type = "glm4v"
    ends_of_turn = ("<|user|>", "<|observation|>")
    other_ends = ("<|endoftext|>",)
    image_placeholder = "<|image|>"
    image_ids = ("image_start_token_id", "image_token_id", "image_end_token_id")
    other_ids = ("video_token_id", "video_start_token_id", "video_end_token_id")
    pixel_bounds = (12544, 11760000)
    bounded_frames = 2
    rotates_pairs = True
    image_processor = "Glm4vImageProcessorPil"
    small_tokenizer = SmallTokenizer(
        SPECIAL,
        (CALL.opening, CALL.closing, THOUGHT.opening, THOUGHT.closing, *ARGUMENTS, *RESPONSE),
        CHAT_TEMPLATE,
    )
    published: ClassVar = {
        "GLM-4.1V-9B-Thinking": _published(65536),
        "GLM-4.6V-Flash": _published(131072),
    }

    def is_projector(self, name: str) -> bool:
        """Tell whether this parameter joins the tower's patches or merges them into visual tokens."""
        return "merger" in name or "downsample" in name

    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes in config.json; see `ModelFamily`."""
        vision = config["vision_config"]
        own = {
            "vision_intermediate": vision["out_hidden_size"],
            "vision_full_blocks": vision["depth"],
            "vision_positions": (vision["image_size"] // vision["patch_size"]) ** 2,
            "merger_size": vision["intermediate_size"],
        }
        return ModelSizes(**self.common_sizes(config) | PARTS | own)

    def before_resizing(self, width: int, height: int, unit: int) -> tuple[int, int]:
        """Return the size of an image after its shorter side has been brought to one visual token's at least."""
        if min(width, height) >= unit:
            return width, height
        scale = max(unit / width, unit / height)
        return int(width * scale), int(height * scale)

    def written_call(self, name: str, arguments: str) -> str:
        """Return a tool call as GLM writes it: arguments in elements of XML, texts without quotes. What is no object
        stands there as it is, so that the environment can say what is wrong with it."""
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            return CALL.around(f"{name}\n{arguments}\n")
        elements = (f"{_element(ARGUMENTS[:2], key)}\n{_element(ARGUMENTS[2:], each)}\n" for key, each in given.items())
        lines = "".join(elements)
        return CALL.around(f"{name}\n{lines}")

    def example(self, sizes: ModelSizes, ids: Mapping[str, int]) -> dict[str, Any]:
        """Return a config.json; see `ModelFamily`. The tower's heads are those of 128 numbers, in small ones of 16."""
        pairs, patch = sizes.head_dim // 4, isqrt(sizes.patch_values // 6)
        text = {
            "vocab_size": sizes.vocab_size,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "max_position_embeddings": sizes.max_context,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8],
            },
            "eos_token_id": [ids[end] for end in (*self.other_ends, *self.ends_of_turn) if end in ids],
            "pad_token_id": ids.get(SPECIAL[0]),
        }
        vision = {
            "depth": sizes.vision_depth,
            "hidden_size": sizes.vision_hidden,
            "num_heads": sizes.vision_hidden // 128 or sizes.vision_hidden // 16,
            "patch_size": patch,
            "image_size": isqrt(sizes.vision_positions) * patch,
            "spatial_merge_size": isqrt(sizes.merge),
            "temporal_patch_size": 2,
            "out_hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.merger_size,
        }
        tokens = {
            "image_start_token_id": "<|begin_of_image|>",
            "image_token_id": self.image_placeholder,
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_token_id": "<|video|>",
            "video_end_token_id": "<|end_of_video|>",
        }
        named = {name: ids[token] for name, token in tokens.items() if token in ids}
        return {"text_config": text, "vision_config": vision, "tie_word_embeddings": sizes.tied, **named}

    def engine_tower(self, visual: Any, mean: Sequence[float], std: Sequence[float]) -> VisionTower[Any]:
        """Return a `Glm4vTower`; see `ModelFamily`."""
        from shared.families.glm4v.glm4v_tower import Glm4vTower

        return Glm4vTower(visual, mean, std)


def _element(tags: Sequence[str], value: Any) -> str:
    opening, closing = tags
    return f"{opening}{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{closing}"
