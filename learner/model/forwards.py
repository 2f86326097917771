"""Forwards that replace those of transformers' modules and use these modules' parts; learner/model/adapt.py installs
them.

The last decoder layer computes queries, output projection and MLP only at positions that predict a token, since no
other position's output is read. Norms, rotations and gate products are one pass over memory each, on a GPU
(kernels/gpu) and in float32 on a CPU (kernels/cpu). In graphs that torch compiles they are plain code, which torch
fuses.

Shape suffixes: T = packed tokens, N = sampled tokens, H = hidden size, A = heads, D = head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb, apply_rotary_pos_emb_vision

from kernels.cpu import cpu_norm, cpu_swiglu
from kernels.cpu import linear as cpu_linear
from kernels.cpu import mlp as cpu_mlp
from kernels.delta_rule import gated_delta_rule, gated_norm, log_decay, short_conv
from kernels.rows import use_triton

LAYER_PARTS = ("mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "head_dim", "scaling", "config")
ATTENTION_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")
DELTA_NET_PARTS = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "dt_bias", "A_log", "norm", "out_proj"),
    *("key_dim", "value_dim", "head_k_dim", "head_v_dim"),
)
VISION_ATTENTION_PARTS = ("qkv", "proj", "num_heads", "scaling", "config")
VISION_ATTENTION_ARGUMENTS = ("hidden_states", "cu_seqlens", "position_embeddings")


def decoder_layer(layer: Any, hidden_states: Tensor, *args: Any, rows: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Compute a decoder layer: hidden_states [1,T,H] -> [1,T,H]; in the last layer, with rows int64 [N], -> [1,N,H]."""
    hidden_states, normed = _add_and_norm(layer.input_layernorm, hidden_states)
    if hasattr(layer, "linear_attn"):
        attended = layer.linear_attn(normed, packing=kwargs["packing"], rows=rows)
    elif hasattr(layer.self_attn, "q_norm"):
        attended, _ = layer.self_attn(*args, hidden_states=normed, rows=rows, **kwargs)
    else:
        attended, _ = layer.self_attn(*args, hidden_states=normed, **kwargs)
        attended = attended if rows is None else attended.index_select(1, rows)
    added = getattr(layer, "post_self_attn_layernorm", None), getattr(layer, "post_mlp_layernorm", None)
    attended = attended if added[0] is None else added[0](attended)  # some families norm what a layer adds, too
    residual = hidden_states if rows is None else hidden_states.index_select(1, rows)
    residual, normed = _add_and_norm(layer.post_attention_layernorm, residual, attended)
    out = cast("Tensor", layer.mlp(normed))
    return residual + (out if added[1] is None else added[1](out))


def _add_and_norm(norm: Any, hidden_states: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return hidden_states [..., H] plus `delta` if there is one, and their norm."""
    kernels = _kernels_for(hidden_states)
    weight = norm_weight(norm)
    if kernels is _CPU_KERNELS and cpu_norm.supports_rms_norm(hidden_states, weight):
        return cpu_norm.add_rms_norm(hidden_states, delta, weight, norm.variance_epsilon)
    hidden_states = hidden_states if delta is None else hidden_states + delta
    return hidden_states, norm(hidden_states)


def norm_weight(norm: Any) -> Tensor:
    """Return what an RMSNorm multiplies by: its weight, or in float32 at least the sum of its offset and its weight
    (`ModelFamily.norm_offset`)."""
    offset = getattr(norm, "offset", 0.0)
    if not offset:
        return cast("Tensor", norm.weight)
    return offset + norm.weight.to(torch.promote_types(norm.weight.dtype, torch.float32))


@torch.compiler.disable  # a plan's levels differ in each microbatch and would cause a new compilation
def delta_net(net: Any, hidden_states: Tensor, *, packing: Any, rows: Tensor | None = None) -> Tensor:
    """Compute a gated delta net over packed documents: hidden_states [1,T,H] -> [1,T,H], with rows [N] -> [1,N,H].

    If the packing has prefixes, T are the tokens that are computed.
    """
    plan = packing.scan
    projections = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
    mixed, z, b, a = (x.squeeze(0) for x in _project(hidden_states, *projections))
    mixed = short_conv(mixed, net.conv1d.weight.squeeze(1), plan)
    query, key, value = mixed.split((net.key_dim, net.key_dim, net.value_dim), -1)
    query, key = (x.unflatten(-1, (-1, net.head_k_dim)) for x in (query, key))
    g = log_decay(a, net.A_log, net.dt_bias)
    out, _ = gated_delta_rule(query, key, value.unflatten(-1, (-1, net.head_v_dim)), g, b.sigmoid(), plan)
    gate = z.unflatten(-1, (-1, net.head_v_dim))
    if rows is not None:
        out, gate = out.index_select(0, rows), gate.index_select(0, rows)
    normed = gated_norm(out, gate, net.norm.weight, net.norm.variance_epsilon)
    return cast("Tensor", net.out_proj(normed.flatten(1)))[None]


def text_attention(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute an attention that normalises its queries and keys: hidden_states [1,T,H] -> [1,T,H].

    With rows int64 [N] only these positions have an output: [1,N,H]. Keys and values are those of all T.
    """
    cos, sin = position_embeddings
    heads = (-1, attention.head_dim)
    query_rows = None if _needs_all_queries(hidden_states) else rows
    if query_rows is None:
        projected = _project(hidden_states, attention.k_proj, attention.v_proj, attention.q_proj)
    else:
        projected = _project(hidden_states, attention.k_proj, attention.v_proj)
        projected += (attention.q_proj(hidden_states.index_select(1, query_rows)),)
    key, value, query = (part.unflatten(-1, heads) for part in projected)
    gate = None
    if projected[2].shape[-1] == 2 * attention.o_proj.in_features:  # each head's query, then its output's gate
        query, gate = query.unflatten(-2, (-1, 2)).unbind(-2)
    key, value = _rms_norm_rope(attention.k_norm, key, cos, sin), value.transpose(1, 2)
    if query_rows is not None:
        cos, sin = cos.index_select(1, query_rows), sin.index_select(1, query_rows)
    query = _rms_norm_rope(attention.q_norm, query, cos, sin)
    compute = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    attended_1NAD, _ = compute(
        attention,
        query,
        key,
        value,
        attention_mask,
        scaling=attention.scaling,
        only_asked=query_rows is not None,
        **kwargs,
    )
    if gate is not None:
        attended_1NAD = attended_1NAD * gate.sigmoid()
    if rows is not None and query_rows is None:
        attended_1NAD = attended_1NAD.index_select(1, rows)
    return attention.o_proj(attended_1NAD.flatten(2)), None


def _project(x: Tensor, *projections: Any) -> tuple[Tensor, ...]:
    if _kernels_for(x) is _CPU_KERNELS and cpu_linear.supports_linears(x, *projections):
        return cpu_linear.linears(x, *projections)
    return tuple(projection(x) for projection in projections)


def _needs_all_queries(x: Tensor) -> bool:
    """Tell whether the attention's kernel needs the queries of all tokens; the kernels for GPUs do."""
    return x.is_cuda


def vision_attention(
    attention: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    """Compute a vision tower's attention, all images in one call: hidden_states [P,H] -> [P,H]."""
    qkv_P3AD = attention.qkv(hidden_states).unflatten(-1, (3, attention.num_heads, -1))
    query_PAD, key_PAD, value_PAD = qkv_P3AD.unbind(1)
    cos, sin = position_embeddings
    kernels = _kernels_for(qkv_P3AD)
    if kernels is not None and kernels.norm.supports_rope(query_PAD, None, cos):
        query_PAD, key_PAD = (kernels.norm.apply_rope(heads, cos, sin) for heads in (query_PAD, key_PAD))
    else:
        query_PAD, key_PAD = apply_rotary_pos_emb_vision(query_PAD, key_PAD, cos, sin)
    heads_first = (x.transpose(0, 1)[None] for x in (query_PAD, key_PAD, value_PAD))
    compute = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    attended_1PAD, _ = compute(attention, *heads_first, None, scaling=attention.scaling, **kwargs)
    return cast("Tensor", attention.proj(attended_1PAD.reshape(hidden_states.shape[0], -1)))


class _Kernels(NamedTuple):
    """Modules of kernels/gpu or of kernels/cpu, which have the same functions."""

    norm: Any
    swiglu: Any
    layer_norm: Any = None  # None on a CPU: torch's own is used


_CPU_KERNELS = _Kernels(cpu_norm, cpu_swiglu)


def _kernels_for(x: Tensor) -> _Kernels | None:
    """Return the one-pass kernels for x's device; None while torch compiles."""
    if torch.compiler.is_compiling():
        return None
    if use_triton(x):
        from kernels.gpu import gpu_norm, gpu_swiglu, layer_norm

        return _Kernels(gpu_norm, gpu_swiglu, layer_norm)
    return _CPU_KERNELS


def _rms_norm_rope(norm: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise x [1,T,A,D] and apply the rotary embedding [1,T,D]; return [1,A,T,D]."""
    kernels, size = _kernels_for(x), cos.shape[-1]
    if size < x.shape[-1]:  # only the first part of a head is rotated
        normed = norm(x).transpose(1, 2)
        turned = apply_rotary_pos_emb(normed[..., :size], torch.empty_like(normed[:, :0, :, :size]), cos, sin)[0]
        return torch.cat((turned, normed[..., size:]), -1)
    weight = norm_weight(norm)
    if kernels is not None and kernels.norm.supports_rope(x, weight, cos):
        rotated: Tensor = kernels.norm.rms_norm_rope(x, weight, norm.variance_epsilon, cos, sin)
        return rotated.transpose(1, 2)
    normed = norm(x).transpose(1, 2)
    return apply_rotary_pos_emb(normed, torch.empty_like(normed[:, :0]), cos, sin)[0]


def rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute an RMS norm: [..., H] -> [..., H]."""
    kernels, weight = _kernels_for(hidden_states), norm_weight(module)
    if kernels is not None and kernels.norm.supports_rms_norm(hidden_states, weight):
        return cast("Tensor", kernels.norm.rms_norm(hidden_states, weight, module.variance_epsilon))
    if weight is module.weight:
        return cast("Tensor", type(module).forward(module, hidden_states))
    wide = hidden_states.to(weight.dtype)
    return F.rms_norm(wide, wide.shape[-1:], weight, module.variance_epsilon).to(hidden_states.dtype)


def layer_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute a LayerNorm: [..., H] -> [..., H]."""
    kernels, own = _kernels_for(hidden_states), (module.weight, module.bias)
    if kernels is None or kernels.layer_norm is None or not kernels.layer_norm.supports_layer_norm(hidden_states, *own):
        return cast("Tensor", type(module).forward(module, hidden_states))
    return cast("Tensor", kernels.layer_norm.layer_norm(hidden_states, *own, module.eps))


def swiglu(mlp: Any, hidden_states: Tensor) -> Tensor:
    """Compute a SwiGLU MLP: [..., H] -> [..., H]."""
    kernels, parts = _kernels_for(hidden_states), (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if kernels is _CPU_KERNELS and cpu_mlp.supports_swiglu_mlp(hidden_states, *parts):
        return cpu_mlp.swiglu_mlp(hidden_states, *(part.weight for part in parts))
    gate, up = mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)
    if kernels is None or not kernels.swiglu.is_supported(gate, up):
        return cast("Tensor", mlp.down_proj(mlp.act_fn(gate) * up))
    return cast("Tensor", mlp.down_proj(kernels.swiglu.swiglu(gate, up)))
