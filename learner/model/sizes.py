"""The sizes of a Qwen3-VL or Qwen2.5-VL model, from its config.json alone: parameters and operations by part.

Also the table of the published models, so that a run can be planned without downloading anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.weights.families import FAMILIES, text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes as config.json names them; the defaults are those of Qwen3-VL's published models. `num_experts` 0: dense.

    `qwen25`: queries, keys and values have biases and no norms, the tower has gated MLPs, RMSNorms and no embedding of
    positions, and all of its blocks but `vision_full_blocks` look through windows of `window_patches`.
    """

    vocab_size: int = 151936
    hidden_size: int
    num_layers: int
    num_dense_layers: int  # of the layers, those without experts
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    tied: bool
    max_context: int = 262144
    vision_depth: int
    vision_hidden: int
    vision_intermediate: int
    vision_positions: int = 2304
    patch_values: int = 3 * 2 * 16 * 16  # colours x frames x height x width of a patch
    merge: int = 4  # patches of one visual token
    num_deepstack: int = 3
    qwen25: bool = False
    vision_full_blocks: int = 0
    window_patches: int = 0

    # ------------------------------------------------------------------ parameters

    @property
    def attention_matrices(self) -> int:
        """Of one decoder layer's projections."""
        return self.hidden_size * 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def attention_vectors(self) -> int:
        """Of one decoder layer's norms, and biases of its attention."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return 2 * self.hidden_size + (biases if self.qwen25 else 2 * self.head_dim)

    @property
    def attention_parameters(self) -> int:
        return self.attention_matrices + self.attention_vectors

    def layer_parameters(self, *, sparse: bool, active: bool = False) -> int:
        """Of one decoder layer; `active`: those that one token passes through."""
        if not sparse:
            return self.attention_parameters + 3 * self.hidden_size * self.intermediate_size
        experts = self.experts_per_token if active else self.num_experts
        router = self.num_experts * self.hidden_size
        return self.attention_parameters + router + experts * 3 * self.hidden_size * self.expert_size

    @property
    def layer_experts(self) -> int:
        """Of the experts of one layer that has some."""
        return self.num_experts * 3 * self.hidden_size * self.expert_size

    @property
    def expert_rows(self) -> tuple[int, int]:
        """Of one expert's matrices, as transformers holds them."""
        return 2 * self.expert_size, self.hidden_size

    @property
    def expert_parameters(self) -> int:
        return (self.num_layers - self.num_dense_layers) * self.layer_experts

    @property
    def matrix_parameters(self) -> int:
        """Of all decoder layers' matrices, without the stacks of experts': those that Muon moves."""
        sparse = self.num_layers - self.num_dense_layers
        dense = self.num_dense_layers * 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * self.attention_matrices + dense + sparse * self.num_experts * self.hidden_size

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def text_parameters(self) -> int:
        sparse = self.num_layers - self.num_dense_layers
        layers = sparse * self.layer_parameters(sparse=True) if sparse else 0
        layers += self.num_dense_layers * self.layer_parameters(sparse=False)
        return layers + self.hidden_size + self.head_parameters * (1 if self.tied else 2)

    @property
    def vision_block_parameters(self) -> int:
        h, i = self.vision_hidden, self.vision_intermediate
        if self.qwen25:
            return 2 * h + 4 * h * h + 4 * h + 3 * h * i + 2 * i + h
        return 4 * h + 4 * h * h + 4 * h + 2 * h * i + i + h

    @property
    def vision_parameters(self) -> int:
        ends = self.patch_values if self.qwen25 else self.patch_values + 1 + self.vision_positions
        return self.vision_depth * self.vision_block_parameters + self.vision_hidden * ends

    @property
    def projector_parameters(self) -> int:
        """Of what merges patches into visual tokens, the deepstack's included."""
        wide = self.merge * self.vision_hidden
        linear = wide * wide + wide + wide * self.hidden_size + self.hidden_size
        if self.qwen25:
            return linear + self.vision_hidden
        return (1 + self.num_deepstack) * linear + 2 * self.vision_hidden + self.num_deepstack * 2 * wide

    @property
    def parameters(self) -> int:
        return self.text_parameters + self.vision_parameters + self.projector_parameters

    # ------------------------------------------------------------------ adapters

    def adapted(self, targets: Sequence[str]) -> list[tuple[int, int, int]]:
        """(how many, rows, columns) of the matrices that these targets of learner.lora mean."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sparse = (self.num_layers - self.num_dense_layers) * self.num_experts
        wide, v, i = self.merge * self.vision_hidden, self.vision_hidden, self.vision_intermediate
        mergers, blocks, dense = 1 + self.num_deepstack, self.vision_depth, self.num_dense_layers
        found = {
            "attention": [(self.num_layers, q, h), (2 * self.num_layers, kv, h), (self.num_layers, h, q)],
            "dense": [(2 * dense, self.intermediate_size, h), (dense, h, self.intermediate_size)],
            "experts": [(sparse, 2 * self.expert_size, h), (sparse, h, self.expert_size)],
            "vision": [(blocks, 3 * v, v), (blocks, v, v), (blocks * (2 if self.qwen25 else 1), i, v), (blocks, v, i)],
        }
        found["vision"] += [(mergers, wide, wide), (mergers, h, wide)]
        return [each for target in targets for each in found[target] if each[0]]

    def adapter_parameters(self, rank: int, targets: Sequence[str]) -> int:
        return sum(count * rank * (rows + columns) for count, rows, columns in self.adapted(targets))

    # ------------------------------------------------------------------ floating-point operations

    def forward_flops(self, documents: Sequence[int], images: Sequence[int], num_rows: int) -> float:
        """Of one forward over packed documents: matrix products and attention, nothing else.

        `documents`: tokens of each, attended to causally; `images`: patches of each distinct one, a product for both
        its equal frames; `num_rows`: rows of which logits and, of the last layer, queries, their projections and the
        MLP are computed (its attention is counted whole; a GPU computes the queries of all rows too). A training step
        takes three times as many, if nothing is recomputed.
        """
        return self.part_flops(sum(documents), sum(n * (n + 1) // 2 for n in documents), images, num_rows)

    def part_flops(self, tokens: int, pairs: int, images: Sequence[int], num_rows: int) -> float:
        """As `forward_flops`, of some of the documents' tokens; `pairs`: of these as queries and the keys they read."""
        patches, h = sum(images), self.vision_hidden
        sparse = self.num_layers - self.num_dense_layers
        active = self.num_dense_layers * self.layer_parameters(sparse=False)
        active += sparse * self.layer_parameters(sparse=True, active=True) if sparse else 0
        width = self.num_heads * self.head_dim
        text = 2 * active * tokens + 2 * self.num_layers * width * 2 * pairs
        text += 2 * self.head_parameters * num_rows
        if self.num_layers > self.num_deepstack:  # see learner/model/forwards.py
            key_value = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
            last = self.layer_parameters(sparse=sparse > 0, active=True) - key_value
            text -= 2 * last * (tokens - num_rows)
        vision = 2 * (self.vision_depth * self.vision_block_parameters + h * self.patch_values // 2) * patches
        full = self.vision_full_blocks if self.qwen25 else self.vision_depth
        vision += 4 * full * h * sum(n * n for n in images)
        vision += 4 * (self.vision_depth - full) * h * sum(n * min(n, self.window_patches) for n in images)
        return text + vision + 2 * self.projector_parameters * patches / self.merge


def sizes_of(config: dict[str, Any]) -> ModelSizes | None:
    """Of a config.json; None for a model type whose sizes are not known here."""
    if config.get("model_type") not in FAMILIES:
        return None
    text, vision = text_config(config), config["vision_config"]
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    step, only_dense = text.get("decoder_sparse_step") or 1, set(text.get("mlp_only_layers") or ())
    dense = [i for i in range(text["num_hidden_layers"]) if not experts or i in only_dense or (i + 1) % step]
    return ModelSizes(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        num_dense_layers=len(dense),
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        intermediate_size=text["intermediate_size"],
        num_experts=experts,
        experts_per_token=text.get("num_experts_per_tok") or 0,
        expert_size=text.get("moe_intermediate_size") or 0,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        max_context=text["max_position_embeddings"],
        vision_depth=vision["depth"],
        vision_hidden=vision["hidden_size"],
        vision_intermediate=vision["intermediate_size"],
        vision_positions=vision.get("num_position_embeddings", 0),
        patch_values=3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        merge=vision["spatial_merge_size"] ** 2,
        num_deepstack=len(vision.get("deepstack_visual_indexes", ())),
        qwen25=config["model_type"] == "qwen2_5_vl",
        vision_full_blocks=len(vision.get("fullatt_block_indexes", ())),
        window_patches=(vision.get("window_size", 0) // vision["patch_size"]) ** 2,
    )


def find(name: str) -> ModelSizes:
    """Of a folder with config.json, or of a published model by name. ValueError naming what there is."""
    file = Path(name) / "config.json"
    if file.exists():
        sizes = sizes_of(json.loads(file.read_text()))
        if sizes is None:
            raise ValueError(f"{file} is of no model type whose sizes are known; those are {', '.join(FAMILIES)}")
        return sizes
    short = name.rpartition("/")[2]
    for base, sizes in PUBLISHED.items():
        if short in (base, f"{base}-Instruct", f"{base}-Thinking"):
            return sizes
    raise ValueError(f"no sizes of {name!r}: give a folder with config.json, or one of {', '.join(PUBLISHED)}")


def _published(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, experts: int, tower: str
) -> ModelSizes:
    """`intermediate`: of the MLP or, where there are experts, of each of them."""
    depth, h, i = {"small": (24, 1024, 4096), "large": (27, 1152, 4304)}[tower]
    return ModelSizes(
        hidden_size=hidden,
        num_layers=layers,
        num_dense_layers=0 if experts else layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=0 if experts else intermediate,
        num_experts=experts,
        experts_per_token=8 if experts else 0,
        expert_size=intermediate if experts else 0,
        tied=tower == "small",
        vision_depth=depth,
        vision_hidden=h,
        vision_intermediate=i,
    )


def _qwen25(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vision_intermediate: int, tied: bool = False
) -> ModelSizes:
    return ModelSizes(
        vocab_size=151936 if tied else 152064,
        hidden_size=hidden,
        num_layers=layers,
        num_dense_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate,
        num_experts=0,
        experts_per_token=0,
        expert_size=0,
        tied=tied,
        max_context=128000,
        vision_depth=32,
        vision_hidden=1280,
        vision_intermediate=vision_intermediate,
        vision_positions=0,
        patch_values=3 * 2 * 14 * 14,
        num_deepstack=0,
        qwen25=True,
        vision_full_blocks=4,
        window_patches=64,
    )


PUBLISHED = {
    "Qwen3-VL-2B": _published(2048, 28, 16, 8, 6144, 0, "small"),
    "Qwen3-VL-4B": _published(2560, 36, 32, 8, 9728, 0, "small"),
    "Qwen3-VL-8B": _published(4096, 36, 32, 8, 12288, 0, "large"),
    "Qwen3-VL-32B": _published(5120, 64, 64, 8, 25600, 0, "large"),
    "Qwen3-VL-30B-A3B": _published(2048, 48, 32, 4, 768, 128, "large"),
    "Qwen3-VL-235B-A22B": _published(4096, 94, 64, 4, 1536, 128, "large"),
    "Qwen2.5-VL-3B": _qwen25(2048, 36, 16, 2, 11008, 3420, tied=True),
    "Qwen2.5-VL-7B": _qwen25(3584, 28, 28, 4, 18944, 3420),
    "Qwen2.5-VL-32B": _qwen25(5120, 64, 40, 8, 27648, 3456),
    "Qwen2.5-VL-72B": _qwen25(8192, 80, 64, 8, 29568, 3456),
}
