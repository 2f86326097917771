"""The common part of the families of text models, which have no vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shared.families.model_family import ModelFamily
from shared.families.model_sizes import ModelSizes
from shared.families.mrope import Grid


class TextFamily(ModelFamily):
    """A family without images, whose tokens are at positions 0, 1, 2, ... and whose models are causal language
    models."""

    auto_class = "AutoModelForCausalLM"
    decoder_path = "model"

    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes in config.json; see `ModelFamily`."""
        return ModelSizes(**self.text_sizes(config))

    def vision_fields(self, config: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
        """Return an image token that no stream contains."""
        return {"image_token_id": -1}

    def image_block(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return no token: there are no images."""
        return ()

    def position_ids(
        self, expanded_ids: np.ndarray, grids: Sequence[Grid], *, image_token_id: int, merge_size: int
    ) -> np.ndarray:
        """Return the tokens' indices on all three axes; see `ModelFamily`."""
        return np.tile(np.arange(len(expanded_ids)), (3, 1))

    def rotary_positions(self, positions: Any) -> Any:
        """Return one of the three axes, which are equal: [batch, tokens]."""
        return positions[0]
