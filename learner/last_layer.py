"""The last decoder layer computes its MLP only where a token is predicted; no other place's output is ever read.

Shape suffixes: T = packed tokens, N = sampled tokens, H = hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def keep_predictors_only(model: PreTrainedModel) -> bool:
    """Makes the last decoder layer of a Qwen-VL model take `rows=`; whether it could be done.

    It cannot where the deepstack's features reach as far as the last layer: they are added to all places.
    """
    layers = model.model.language_model.layers
    if len(layers) <= len(getattr(model.config.vision_config, "deepstack_visual_indexes", ())):
        return False
    plain = type(layers[-1])
    layers[-1].__class__ = type(f"Last{plain.__name__}", (_LastLayer, plain), {})
    return True


class _LastLayer(nn.Module):
    """Mixed into a decoder layer of transformers, whose parts it uses."""

    def forward(self, hidden_states: Tensor, *args: Any, rows: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1,T,H] and rows int64 [N] -> [1,N,H]."""
        attended, _ = self.self_attn(*args, hidden_states=self.input_layernorm(hidden_states), **kwargs)  # type: ignore
        kept = hidden_states.index_select(1, rows) + attended.index_select(1, rows)
        return kept + self.mlp(self.post_attention_layernorm(kept))  # type: ignore[operator]
