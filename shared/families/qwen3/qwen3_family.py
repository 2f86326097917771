"""The family Qwen3: dense text models."""

from __future__ import annotations

from typing import ClassVar

from shared.families.model_family import PublishedModel
from shared.families.model_sizes import ModelSizes
from shared.families.text_family import TextFamily

HYBRID = ("", "Base")
"""The models that think or do not, as they are asked, have no variant in their names."""


def _published(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    *,
    tied: bool = False,
    variants: tuple[str, ...] = HYBRID,
    max_context: int = 40960,
) -> PublishedModel:
    sizes = ModelSizes(
        vocab_size=151936,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        tied=tied,
        max_context=max_context,
    )
    return PublishedModel("Qwen", variants, sizes)


class Qwen3(TextFamily):
    """Qwen3: text models with ChatML turns, whose queries and keys are normed."""

    title = "Qwen3"
    model_type = "qwen3"
    ends_of_turn = ("<|im_end|>",)
    other_ends = ("<|endoftext|>",)
    published: ClassVar = {
        "Qwen3-0.6B": _published(1024, 28, 16, 3072, tied=True),
        "Qwen3-1.7B": _published(2048, 28, 16, 6144, tied=True),
        "Qwen3-4B": _published(2560, 36, 32, 9728, tied=True),
        "Qwen3-4B-Instruct-2507": _published(2560, 36, 32, 9728, tied=True, variants=("",), max_context=262144),
        "Qwen3-4B-Thinking-2507": _published(2560, 36, 32, 9728, tied=True, variants=("",), max_context=262144),
        "Qwen3-8B": _published(4096, 36, 32, 12288),
        "Qwen3-14B": _published(5120, 40, 40, 17408),
        "Qwen3-32B": _published(5120, 64, 64, 25600, variants=("",)),
    }
