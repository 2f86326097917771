"""The last decoder layer asks, projects and computes its MLP only where a token is predicted; no other place's output
is ever read. The forwards here replace those of transformers' modules (learner/model/adapt.py), whose parts they use.

Shape suffixes: T = packed tokens, N = sampled tokens, H = hidden size, A = heads, D = head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

LAYER_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "config")
ATTENTION_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")


def decode(layer: Any, hidden_states: Tensor, *args: Any, rows: Tensor, **kwargs: Any) -> Tensor:
    """A decoder layer's forward: hidden_states [1,T,H] and rows int64 [N] -> [1,N,H]."""
    normed = layer.input_layernorm(hidden_states)
    if hasattr(layer.self_attn, "q_norm"):
        attended, _ = layer.self_attn(*args, hidden_states=normed, rows=rows, **kwargs)
    else:
        attended, _ = layer.self_attn(*args, hidden_states=normed, **kwargs)
        attended = attended.index_select(1, rows)
    kept = hidden_states.index_select(1, rows) + attended
    return kept + layer.mlp(layer.post_attention_layernorm(kept))


def attend(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    rows: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A Qwen3-VL attention's forward: hidden_states [1,T,H] and rows int64 [N] -> [1,N,H]. Keys and values are those
    of all T."""
    whole = _takes_all_queries(hidden_states)
    asking = hidden_states if whole else hidden_states.index_select(1, rows)
    heads = (-1, attention.head_dim)
    query = attention.q_norm(attention.q_proj(asking).unflatten(-1, heads)).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(hidden_states).unflatten(-1, heads)).transpose(1, 2)
    value = attention.v_proj(hidden_states).unflatten(-1, heads).transpose(1, 2)
    cos, sin = position_embeddings
    key = _turned(key, cos, sin)
    query = _turned(query, cos, sin) if whole else _turned(query, *(x.index_select(1, rows) for x in (cos, sin)))
    compute = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    attended_1NAD, _ = compute(
        attention, query, key, value, attention_mask, scaling=attention.scaling, only_asked=not whole, **kwargs
    )
    if whole:
        attended_1NAD = attended_1NAD.index_select(1, rows)
    return attention.o_proj(attended_1NAD.flatten(2)), None


def _takes_all_queries(x: Tensor) -> bool:
    """A GPU's kernels take no queries from places of their own: there all are computed, then most left out."""
    return x.is_cuda


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1,A,T,D] by the rotary embedding [1,T,D]."""
    nothing = torch.empty_like(x[:, :0])
    return apply_rotary_pos_emb(x, nothing, cos, sin)[0]
