"""One decoder layer of the embedded engine over packed tokens and a slotted KV cache: by torch, anywhere, and by
kernels/cpu/layer.py, on a CPU in float32.

Suffixes: N = new tokens of all sequences, R = sequences, H = query heads, K = key heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cpu import layer as cpu_layer
from kernels.cpu.library import fits as fits_library
from kernels.cpu.linear import linear

Cache = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [slots, K, max_context, D]."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of the batch attend over slots [slot, slot + count), the first `length` entries of each."""

    start: int
    end: int
    slot: int
    count: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Where the tokens of a step stand. `angles`: cosine and sine float[N, D] of their positions.

    `entry`: int64[N], where a token's K and V of the first head go in a layer's cache, seen as
    [slots * K * max_context, D]; -1 for padding, which comes after the `stored` tokens. Sequences that add one token
    come first: `first` and `length`, int64 each, are where their slots begin, counted likewise, and the entries that
    they see, the new one among them. `singles` are segments of these sequences, empty for CpuLayer, `longer` those of
    all others, without a mask for CpuLayer.
    """

    angles: tuple[Tensor, Tensor]
    entry: Tensor
    stored: int
    first: Tensor
    length: Tensor
    singles: Sequence[Segment]
    longer: Sequence[Segment]


class Layer:
    """A text layer with its parallel projections fused; the module's own parameters become views of the fused."""

    def __init__(self, module: Any, num_heads: int, num_kv_heads: int, eps: float) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention, self.mlp, self.eps = attention, mlp, eps
        self.input_norm, self.post_norm = module.input_layernorm, module.post_attention_layernorm
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv_weight = _concatenate([p.weight for p in projections])
        self.qkv_bias = None if attention.q_proj.bias is None else _concatenate([p.bias for p in projections])
        dense = hasattr(mlp, "gate_proj")  # a mixture of experts runs as it is
        self.gate_up_weight = _concatenate([mlp.gate_proj.weight, mlp.up_proj.weight]) if dense else None
        self._norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.qk_norm: Tensor | None = None  # weights of these norms, [H + K, D]
        self.weights_changed()

    def weights_changed(self) -> None:
        """Copies the norms' weights anew: they are laid out by head."""
        if self._norms is not None:
            heads = (self.num_heads, self.num_kv_heads)
            weights = [norm.weight.detach().expand(n, -1) for norm, n in zip(self._norms, heads, strict=True)]
            self.qk_norm = torch.cat(weights)

    def forward(self, hidden: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """[N, hidden] -> the same; the tokens' K and V are in the cache afterwards. May write to `hidden`."""
        normed = self.add_norm(hidden, None, self.input_norm.weight)
        heads = linear(normed, self.qkv_weight, self.qkv_bias).view(len(hidden), -1, self.head_dim)
        heads = self.rotate_and_store(heads, cache, batch)
        attended = self.attention.o_proj(self.attend(heads, cache, batch))
        normed = self.add_norm(hidden, attended, self.post_norm.weight)
        if self.gate_up_weight is None:
            return hidden.add_(self.mlp(normed[None])[0])
        gated = self.gate(linear(normed, self.gate_up_weight))
        return hidden.add_(self.mlp.down_proj(gated))

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Adds `delta` to `hidden` in place; the RMS norm of the sum."""
        if delta is not None:
            hidden.add_(delta)
        return F.rms_norm(hidden, hidden.shape[-1:], weight, self.eps)

    def rotate_and_store(self, heads: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """[N, H + 2 K, D] -> the same with queries normed and turned; keys, so treated, and values go to the cache."""
        num_qk = self.num_heads + self.num_kv_heads
        qk = heads[:, :num_qk]
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), None, self.eps) * self.qk_norm
        half = self.head_dim // 2
        cos, sin = (angle[:, None] for angle in batch.angles)
        qk = qk * cos + torch.cat((-qk[..., half:], qk[..., :half]), dim=-1) * sin
        stored, context = batch.stored, cache[0].shape[2]
        offsets = torch.arange(self.num_kv_heads, device=heads.device) * context
        index = (batch.entry[:stored, None] + offsets).reshape(-1)
        for store, new in zip(cache, (qk[:stored, self.num_heads :], heads[:stored, num_qk:]), strict=True):
            store.view(-1, self.head_dim).index_copy_(0, index, new.reshape(-1, self.head_dim))
        return qk

    def attend(self, heads: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Attention of each token to its sequence: the first H of `heads` -> [N, H * D]."""
        query = heads[:, : self.num_heads]
        out = torch.zeros((len(query), self.num_heads, self.head_dim), dtype=query.dtype, device=query.device)
        for segment in batch.singles:
            self._attend_one_each(query, cache, segment, out)
        for segment in batch.longer:
            self._attend_causally(query, cache, segment, out)
        return out.view(len(query), -1)

    def gate(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (or what the model has instead): [N, 2 * width] -> [N, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.mlp.act_fn(gate) * up

    def _attend_one_each(self, query: Tensor, cache: Cache, s: Segment, out: Tensor) -> None:
        """Neighbouring slots with one query token each; the heads that share keys are the queries of one product."""
        first, last = s.slot, s.slot + s.count
        q = query[s.start : s.end].view(s.count, self.num_kv_heads, -1, self.head_dim)
        k, v = (stored[first:last, :, : s.length] for stored in cache)
        part = F.scaled_dot_product_attention(q, k, v, s.mask)
        out[s.start : s.end] = part.view(s.count, self.num_heads, self.head_dim)

    def _attend_causally(self, query: Tensor, cache: Cache, s: Segment, out: Tensor) -> None:
        """Several tokens of one sequence: query [N, H, D] -> their rows of out [N, H, D]."""
        q = query[s.start : s.end].transpose(0, 1)[None]
        k, v = (stored[s.slot, None, :, : s.length] for stored in cache)
        grouped = self.num_heads > self.num_kv_heads
        part = F.scaled_dot_product_attention(q, k, v, s.mask, is_causal=s.mask is None, enable_gqa=grouped)
        out[s.start : s.end] = part[0].transpose(0, 1)


class CpuLayer(Layer):
    """The same by kernels/cpu/layer.py, which takes the cache of each sequence as it is: no neighbours, no masks."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        return cpu_layer.add_rms_norm(hidden, delta, weight, self.eps)

    def rotate_and_store(self, heads: Tensor, cache: Cache, batch: Batch) -> Tensor:
        cpu_layer.rotate_and_store(heads, self.qk_norm, self.eps, batch.angles, batch.entry, cache)
        return heads

    def attend(self, heads: Tensor, cache: Cache, batch: Batch) -> Tensor:
        out = heads.new_zeros(len(heads), self.num_heads, self.head_dim)
        cpu_layer.attend(heads, batch.first, batch.length, cache, out)
        for s in batch.longer:
            past = s.length - (s.end - s.start)
            cpu_layer.attend_causally(heads[s.start : s.end], s.slot, past, cache, out[s.start : s.end])
        return out.view(len(heads), -1)

    def gate(self, gate_up: Tensor) -> Tensor:
        return cpu_layer.silu_mul(*gate_up.chunk(2, dim=1))


def make_layers(text: Any, config: Any) -> list[Layer]:
    """The layers of a text model of transformers, of the faster kind that fits them."""
    heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = text.layers[0].self_attn.head_dim
    fits = fits_library(text.embed_tokens.weight, *heads, head_dim) and config.hidden_act == "silu"
    kind = CpuLayer if fits else Layer
    return [kind(module, *heads, config.rms_norm_eps) for module in text.layers]


def _concatenate(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor that the parameters share from now on: writing to a parameter writes to it."""
    fused = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused
