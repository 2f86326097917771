"""The interface that each family of models implements.

A family gives parameters the names of its published checkpoints, reads a model's sizes from its config.json, turns
images into tokens and positions if it takes any, and finds the parts of transformers' model.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shared.families.marks import CALL
from shared.families.model_sizes import ModelSizes
from shared.families.mrope import Grid

if TYPE_CHECKING:
    from shared.families.engine_tower import VisionTower


@dataclass(frozen=True, slots=True)
class SmallTokenizer:
    """What the tokenizer of a family's small models has of the published ones. `special`: control tokens, first the one
    that ends a text; `plain`: added tokens that no text has to spell; `chat_template`: as published."""

    special: tuple[str, ...]
    plain: tuple[str, ...]
    chat_template: str


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of the hub: `organisation`/NAME-`variant` for each of its variants, NAME alone for the variant ""."""

    organisation: str
    variants: tuple[str, ...]
    sizes: ModelSizes

    def hub_names(self, name: str) -> dict[str, str]:
        """Return the hub's name of each variant, by its name without the organisation."""
        names = [f"{name}-{variant}" if variant else name for variant in self.variants]
        return {each: f"{self.organisation}/{each}" for each in names}


class ModelFamily(ABC):
    """One family of models. Its object holds no state: `model_type` identifies it.

    `prefixes`: pairs (prefix of parameters' names in transformers, prefix in the published checkpoint). `transposed`:
    name endings of the stacks of matrices that transformers holds as [experts, out, in] and the checkpoint as [experts,
    in, out].
    """

    title: ClassVar[str]  # its name in messages and tables
    model_type: ClassVar[str]  # in config.json
    auto_class: ClassVar[str] = "AutoModelForImageTextToText"  # class of transformers that makes its models
    ends_of_turn: ClassVar[tuple[str, ...]]  # the tokens with which its chat template ends a model's turn, usual first
    other_ends: ClassVar[tuple[str, ...]] = ()  # further tokens with which a model may end its turn
    image_placeholder: ClassVar[str] = ""  # the token that stands for an image's visual tokens; "" = it takes none
    prefixes: ClassVar[tuple[tuple[str, str], ...]] = ()
    transposed: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[re.Pattern[str] | None] = None  # tensors of published checkpoints that are not loaded
    norm_offset: ClassVar[float] = 0.0  # the decoder's RMSNorms multiply by this plus their weight
    rotates_pairs: ClassVar[bool] = False  # rotary angles turn a head's neighbouring numbers, not those half apart
    is_recurrent: ClassVar[bool] = False  # some layers carry a state from token to token
    bounded_frames: ClassVar[int] = 1  # equal frames of a still image that preprocessor_config.json's bounds count
    decoder_path: ClassVar[str]  # path of the language model in transformers' model
    tower_path: ClassVar[str] = ""  # path of the vision tower in transformers' model; "" = it has none
    published: ClassVar[Mapping[str, PublishedModel]] = {}  # by name without the variant
    small_tokenizer: ClassVar[SmallTokenizer | None] = None  # None: Qwen's (launch/tiny_models/build.py)
    image_processor: ClassVar[str] = "Qwen2VLImageProcessorPil"  # class of transformers, for small models

    @property
    def takes_images(self) -> bool:
        """Tell whether its models have a vision tower."""
        return bool(self.tower_path)

    # ------------------------------------------------------------------ parameters

    def published_name(self, name: str) -> str:
        """Return the published checkpoint's name of the parameter that transformers calls `name`."""
        for own, published in self.prefixes:
            if name.startswith(own):
                return published + name.removeprefix(own)
        return name

    def is_transposed(self, name: str) -> bool:
        """Tell whether the checkpoint holds this parameter, by either name, with its last two dimensions swapped."""
        return name.endswith(self.transposed)

    def is_projector(self, name: str) -> bool:
        """Tell whether this parameter of the tower merges its patches into visual tokens."""
        return "merger" in name

    def lora_targets(self) -> Mapping[str, re.Pattern[str]]:
        """Return, for each target of learner.lora, the pattern of transformers' names of its linear layers. Experts
        have none: they are recognised by shape."""
        layer = rf"^{re.escape(self.decoder_path)}\.layers\.\d+\."
        targets = {"attention": layer + r"self_attn\.\w+$", "dense": layer + r"mlp\.\w+$"}
        if self.takes_images:
            targets["vision"] = rf"^{re.escape(self.tower_path)}\."
        return {target: re.compile(pattern) for target, pattern in targets.items()}

    # ------------------------------------------------------------------ config.json

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a config.json that describes the text model; in older ones this is the whole."""
        return config.get("text_config") or config

    @abstractmethod
    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes of the model with this config.json. Raise KeyError if it lacks one."""

    def text_sizes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `ModelSizes` about the decoder, which most families read from the same keys."""
        text = self.text_config(config)
        num_experts = text.get("num_experts") or text.get("num_local_experts") or 0
        step = text.get("decoder_sparse_step") or 1
        only_dense = set(text.get("mlp_only_layers") or ())
        layers = range(text["num_hidden_layers"])
        dense = [i for i in layers if not num_experts or i in only_dense or (i + 1) % step]
        return {
            "vocab_size": text["vocab_size"],
            "hidden_size": text["hidden_size"],
            "num_layers": text["num_hidden_layers"],
            "num_dense_layers": len(dense),
            "num_heads": text["num_attention_heads"],
            "num_kv_heads": text["num_key_value_heads"],
            "head_dim": text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
            "intermediate_size": text.get("intermediate_size") or 0,
            "num_experts": num_experts,
            "experts_per_token": text.get("num_experts_per_tok") or 0,
            "expert_size": text.get("moe_intermediate_size") or 0,
            "shared_expert_size": text.get("shared_expert_intermediate_size") or 0,
            "tied": bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            "max_context": text["max_position_embeddings"],
        }

    @abstractmethod
    def vision_fields(self, config: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `VisionSpec`, from config.json and preprocessor_config.json. Raise ValueError if they
        describe no vision model."""

    def before_resizing(self, width: int, height: int, unit: int) -> tuple[int, int]:
        """Return the size (width, height) of which an image's size in the model is computed. `unit`: the side of a
        visual token in pixels."""
        return width, height

    def example(self, sizes: ModelSizes, ids: Mapping[str, int]) -> dict[str, Any]:
        """Return a config.json, as transformers' class takes it, of a model of these sizes. `ids`: token ids by token.
        A family implements it for its small models and its tests."""
        raise NotImplementedError(f"{type(self).__name__} has no example")

    # ------------------------------------------------------------------ tokens

    @abstractmethod
    def image_block(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token ids of one image in the compact stream, which has one placeholder for each."""

    @abstractmethod
    def position_ids(
        self, expanded_ids: np.ndarray, grids: Sequence[Grid], *, image_token_id: int, merge_size: int
    ) -> np.ndarray:
        """Return int64[3, E], the positions (time, height, width) of a stream with one placeholder per visual token."""

    def written_call(self, name: str, arguments: str) -> str:
        """Return a tool call as its models write it. `arguments`: their JSON."""
        return CALL.around(f'\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n')

    # ------------------------------------------------------------------ torch, when a model is built

    def prepare(self) -> None:
        """Register the family's classes with transformers' Auto classes, if transformers does not know them. Call it
        before a model's config or weights are loaded."""
        return

    def decoder(self, model: Any) -> Any:
        """Return the module of transformers' model that has `embed_tokens`, `rotary_emb`, `layers` and `norm`."""
        return model.get_submodule(self.decoder_path)

    def tower(self, model: Any) -> Any:
        """Return the vision tower of transformers' model, None if the family has none."""
        return model.get_submodule(self.tower_path) if self.takes_images else None

    def rotary_positions(self, positions: Any) -> Any:
        """Return what the decoder's rotary embedding takes, from positions [3, batch, tokens] as `position_ids` counts
        them."""
        return positions

    def engine_tower(self, visual: Any, mean: Sequence[float], std: Sequence[float]) -> VisionTower[Any]:
        """Return the embedded engine's tower, made of transformers' `visual`. `mean` and `std` normalise the
        colours. A family that takes images has to implement it."""
        raise NotImplementedError(f"{type(self).__name__} has no engine_tower")
