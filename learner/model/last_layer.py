"""The last decoder layer asks, projects and computes its MLP only where a token is predicted; no other place's output
is ever read.

Shape suffixes: T = packed tokens, N = sampled tokens, H = hidden size, A = heads, D = head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb


def keep_predictors_only(model: PreTrainedModel) -> bool:
    """Makes the last decoder layer of a Qwen-VL model take `rows=`; whether it could be done.

    It cannot where the deepstack's features reach as far as the last layer: they are added to all places.
    """
    layers = model.model.language_model.layers
    if len(layers) <= len(getattr(model.config.vision_config, "deepstack_visual_indexes", ())):
        return False
    if hasattr(layers[-1].self_attn, "q_norm"):  # Qwen3; Qwen2.5 turns its heads in another way
        _mix_in(_LastAttention, layers[-1].self_attn)
    _mix_in(_LastLayer, layers[-1])
    return True


def _mix_in(part: type[nn.Module], module: nn.Module) -> None:
    plain = type(module)
    module.__class__ = type(f"Last{plain.__name__}", (part, plain), {})


class _LastLayer(nn.Module):
    """Mixed into a decoder layer of transformers, whose parts it uses."""

    def forward(self, hidden_states: Tensor, *args: Any, rows: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1,T,H] and rows int64 [N] -> [1,N,H]."""
        normed = self.input_layernorm(hidden_states)  # type: ignore[operator]
        if isinstance(self.self_attn, _LastAttention):
            attended, _ = self.self_attn(*args, hidden_states=normed, rows=rows, **kwargs)
        else:
            attended, _ = self.self_attn(*args, hidden_states=normed, **kwargs)  # type: ignore[operator]
            attended = attended.index_select(1, rows)
        kept = hidden_states.index_select(1, rows) + attended
        return kept + self.mlp(self.post_attention_layernorm(kept))  # type: ignore[operator]


class _LastAttention(nn.Module):
    """Mixed into an attention of Qwen3-VL, whose parts it uses."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        rows: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [1,T,H] and rows int64 [N] -> [1,N,H]. Keys and values are those of all T."""
        whole = _takes_all_queries(hidden_states)
        asking = hidden_states if whole else hidden_states.index_select(1, rows)
        heads = (-1, self.head_dim)
        query = self.q_norm(self.q_proj(asking).unflatten(-1, heads)).transpose(1, 2)  # type: ignore[operator]
        key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, heads)).transpose(1, 2)  # type: ignore[operator]
        value = self.v_proj(hidden_states).unflatten(-1, heads).transpose(1, 2)  # type: ignore[operator]
        cos, sin = position_embeddings
        key = _turned(key, cos, sin)
        query = _turned(query, cos, sin) if whole else _turned(query, *(x.index_select(1, rows) for x in (cos, sin)))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]  # type: ignore[union-attr]
        chosen = {} if whole else {"queries_at": rows}
        attended_1NAD, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **chosen, **kwargs)
        if whole:
            attended_1NAD = attended_1NAD.index_select(1, rows)
        return self.o_proj(attended_1NAD.flatten(2)), None  # type: ignore[operator]


def _takes_all_queries(x: Tensor) -> bool:
    """A GPU's kernels take no queries from places of their own: there all are computed, then most left out."""
    return x.is_cuda


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1,A,T,D] by the rotary embedding [1,T,D]."""
    nothing = torch.empty_like(x[:, :0])
    return apply_rotary_pos_emb(x, nothing, cos, sin)[0]
