"""Forwards that replace those of transformers' modules (learner/model/adapt.py), whose parts they use.

The last decoder layer asks, projects and computes its MLP only where a token is predicted; no other place's output is
ever read. Norms, rotations and the products of gates are one pass over memory each, on a GPU (kernels/gpu) and in
float32 on a CPU (kernels/cpu); in graphs that torch compiles they are plain, as it fuses them.

Shape suffixes: T = packed tokens, N = sampled tokens, H = hidden size, A = heads, D = head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb, apply_rotary_pos_emb_vision

from kernels.cpu import linear as cpu_linear
from kernels.cpu import mlp as cpu_mlp
from kernels.cpu import norm as cpu_norm
from kernels.cpu import swiglu as cpu_swiglu
from kernels.rows import use_triton

LAYER_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "config")
ATTENTION_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")
LOOK_PARTS = ("qkv", "proj", "num_heads", "scaling", "config")
LOOK_ARGUMENTS = ("hidden_states", "cu_seqlens", "position_embeddings")


def decode(layer: Any, hidden_states: Tensor, *args: Any, rows: Tensor | None = None, **kwargs: Any) -> Tensor:
    """A decoder layer's forward: hidden_states [1,T,H] and, in the last layer, rows int64 [N] -> [1,T,H] or [1,N,H]."""
    hidden_states, normed = _add_and_norm(layer.input_layernorm, hidden_states)
    if hasattr(layer.self_attn, "q_norm"):
        attended, _ = layer.self_attn(*args, hidden_states=normed, rows=rows, **kwargs)
    else:
        attended, _ = layer.self_attn(*args, hidden_states=normed, **kwargs)
        attended = attended if rows is None else attended.index_select(1, rows)
    kept = hidden_states if rows is None else hidden_states.index_select(1, rows)
    kept, normed = _add_and_norm(layer.post_attention_layernorm, kept, attended)
    return kept + cast("Tensor", layer.mlp(normed))


def _add_and_norm(norm: Any, hidden_states: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """hidden_states [..., H], to which delta is added if there is one, and their norm."""
    kernels = _kernels_for(hidden_states)
    if kernels is _CPU_KERNELS and cpu_norm.norms(hidden_states, norm.weight):
        return cpu_norm.add_rms_norm(hidden_states, delta, norm.weight, norm.variance_epsilon)
    hidden_states = hidden_states if delta is None else hidden_states + delta
    return hidden_states, norm(hidden_states)


def attend(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A Qwen3-VL attention's forward: hidden_states [1,T,H] and, where not all places ask, rows int64 [N] -> [1,N,H] or
    [1,T,H]. Keys and values are those of all T."""
    cos, sin = position_embeddings
    heads = (-1, attention.head_dim)
    asked = None if _takes_all_queries(hidden_states) else rows
    if asked is None:
        projected = _projected(hidden_states, attention.k_proj, attention.v_proj, attention.q_proj)
    else:
        projected = _projected(hidden_states, attention.k_proj, attention.v_proj)
        projected += (attention.q_proj(hidden_states.index_select(1, asked)),)
    key, value, query = (part.unflatten(-1, heads) for part in projected)
    key, value = _turned(attention.k_norm, key, cos, sin), value.transpose(1, 2)
    if asked is not None:
        cos, sin = cos.index_select(1, asked), sin.index_select(1, asked)
    query = _turned(attention.q_norm, query, cos, sin)
    compute = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    attended_1NAD, _ = compute(
        attention, query, key, value, attention_mask, scaling=attention.scaling, only_asked=asked is not None, **kwargs
    )
    if rows is not None and asked is None:
        attended_1NAD = attended_1NAD.index_select(1, rows)
    return attention.o_proj(attended_1NAD.flatten(2)), None


def _projected(x: Tensor, *projections: Any) -> tuple[Tensor, ...]:
    if _kernels_for(x) is _CPU_KERNELS and cpu_linear.are_plain(x, *projections):
        return cpu_linear.linears(x, *projections)
    return tuple(projection(x) for projection in projections)


def _takes_all_queries(x: Tensor) -> bool:
    """A GPU's kernels take no queries from places of their own: there all are computed, then most left out."""
    return x.is_cuda


def look(
    attention: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    """A vision tower's attention's forward, all images in one call: hidden_states [P,H] -> [P,H]."""
    qkv_P3AD = attention.qkv(hidden_states).unflatten(-1, (3, attention.num_heads, -1))
    query_PAD, key_PAD, value_PAD = qkv_P3AD.unbind(1)
    cos, sin = position_embeddings
    kernels = _kernels_for(qkv_P3AD)
    if kernels is not None and kernels.norm.turns(query_PAD, None, cos):
        query_PAD, key_PAD = (kernels.norm.turned(heads, cos, sin) for heads in (query_PAD, key_PAD))
    else:
        query_PAD, key_PAD = apply_rotary_pos_emb_vision(query_PAD, key_PAD, cos, sin)
    heads_first = (x.transpose(0, 1)[None] for x in (query_PAD, key_PAD, value_PAD))
    compute = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    attended_1PAD, _ = compute(attention, *heads_first, None, scaling=attention.scaling, **kwargs)
    return cast("Tensor", attention.proj(attended_1PAD.reshape(hidden_states.shape[0], -1)))


class _Kernels(NamedTuple):
    """Modules of kernels/gpu or of kernels/cpu, which give the same functions."""

    norm: Any
    swiglu: Any
    layer_norm: Any = None  # a CPU has torch's


_CPU_KERNELS = _Kernels(cpu_norm, cpu_swiglu)


def _kernels_for(x: Tensor) -> _Kernels | None:
    """What computes in one pass where x is; None while torch compiles."""
    if torch.compiler.is_compiling():
        return None
    if use_triton(x):
        from kernels.gpu import layer_norm, norm, swiglu

        return _Kernels(norm, swiglu, layer_norm)
    return _CPU_KERNELS


def _turned(norm: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1,T,A,D], normed and turned by the rotary embedding [1,T,D]: [1,A,T,D]."""
    kernels = _kernels_for(x)
    if kernels is not None and kernels.norm.turns(x, norm.weight, cos):
        turned: Tensor = kernels.norm.rms_norm_turned(x, norm.weight, norm.variance_epsilon, cos, sin)
        return turned.transpose(1, 2)
    normed = norm(x).transpose(1, 2)
    return apply_rotary_pos_emb(normed, torch.empty_like(normed[:, :0]), cos, sin)[0]


def normed(module: Any, hidden_states: Tensor) -> Tensor:
    """An RMS norm's forward: [..., H] -> [..., H]."""
    kernels = _kernels_for(hidden_states)
    if kernels is None or not kernels.norm.norms(hidden_states, module.weight):
        return cast("Tensor", type(module).forward(module, hidden_states))
    return cast("Tensor", kernels.norm.rms_norm(hidden_states, module.weight, module.variance_epsilon))


def centred(module: Any, hidden_states: Tensor) -> Tensor:
    """A LayerNorm's forward: [..., H] -> [..., H]."""
    kernels, own = _kernels_for(hidden_states), (module.weight, module.bias)
    if kernels is None or kernels.layer_norm is None or not kernels.layer_norm.centred(hidden_states, *own):
        return cast("Tensor", type(module).forward(module, hidden_states))
    return cast("Tensor", kernels.layer_norm.layer_norm(hidden_states, *own, module.eps))


def gated(mlp: Any, hidden_states: Tensor) -> Tensor:
    """A SwiGLU MLP's forward: [..., H] -> [..., H]."""
    kernels, parts = _kernels_for(hidden_states), (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if kernels is _CPU_KERNELS and cpu_mlp.fits(hidden_states, *parts):
        return cpu_mlp.swiglu_mlp(hidden_states, *(part.weight for part in parts))
    gate, up = mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)
    if kernels is None or not kernels.swiglu.takes(gate, up):
        return cast("Tensor", mlp.down_proj(mlp.act_fn(gate) * up))
    return cast("Tensor", mlp.down_proj(kernels.swiglu.swiglu(gate, up)))
