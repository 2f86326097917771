"""The interface that each family of models implements.

A family gives parameters the names of its published checkpoints, reads a model's sizes from its config.json, turns
images into tokens and positions, and finds the parts of transformers' model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shared.families.model_sizes import ModelSizes
from shared.families.mrope import Grid

if TYPE_CHECKING:
    from shared.families.engine_tower import VisionTower


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of the hub: `organisation`/NAME-`variant` for each of its variants."""

    organisation: str
    variants: tuple[str, ...]
    sizes: ModelSizes


class ModelFamily(ABC):
    """One family of models. Its object holds no state: `model_type` identifies it.

    `prefixes`: pairs (prefix of parameters' names in transformers, prefix in the published checkpoint). `transposed`:
    name endings of the stacks of matrices that transformers holds as [experts, out, in] and the checkpoint as [experts,
    in, out].
    """

    model_type: ClassVar[str]  # in config.json
    end_of_turn: ClassVar[str]  # the token with which the model ends its turn
    image_placeholder: ClassVar[str]  # the token that stands for an image's visual tokens
    prefixes: ClassVar[tuple[tuple[str, str], ...]] = ()
    transposed: ClassVar[tuple[str, ...]] = ()
    decoder_path: ClassVar[str]  # path of the language model in transformers' model
    tower_path: ClassVar[str]  # path of the vision tower in transformers' model
    published: ClassVar[Mapping[str, PublishedModel]] = {}  # by name without the variant

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
        return {
            "attention": re.compile(layer + r"self_attn\.\w+$"),
            "dense": re.compile(layer + r"mlp\.\w+$"),
            "vision": re.compile(rf"^{re.escape(self.tower_path)}\."),
        }

    # ------------------------------------------------------------------ config.json

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a config.json that describes the text model; in older ones this is the whole."""
        return config.get("text_config") or config

    @abstractmethod
    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes of the model with this config.json. Raise KeyError if it lacks one."""

    @abstractmethod
    def vision_fields(self, config: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `VisionSpec`, from config.json and preprocessor_config.json. Raise ValueError if they
        describe no vision model."""

    # ------------------------------------------------------------------ tokens

    @abstractmethod
    def image_block(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token ids of one image in the compact stream, which has one placeholder for each."""

    @abstractmethod
    def position_ids(
        self, expanded_ids: np.ndarray, grids: Sequence[Grid], *, image_token_id: int, merge_size: int
    ) -> np.ndarray:
        """Return int64[3, E], the positions (time, height, width) of a stream with one placeholder per visual token."""

    # ------------------------------------------------------------------ torch, when a model is built

    def prepare(self) -> None:
        """Register the family's classes with transformers' Auto classes, if transformers does not know them. Call it
        before a model's config or weights are loaded."""
        return

    def decoder(self, model: Any) -> Any:
        """Return the module of transformers' model that has `embed_tokens`, `rotary_emb`, `layers` and `norm`."""
        return model.get_submodule(self.decoder_path)

    def tower(self, model: Any) -> Any:
        """Return the vision tower of transformers' model."""
        return model.get_submodule(self.tower_path)

    @abstractmethod
    def engine_tower(self, visual: Any, mean: Sequence[float], std: Sequence[float]) -> VisionTower[Any]:
        """Return the embedded engine's tower, made of transformers' `visual`. `mean` and `std` normalise the
        colours."""
