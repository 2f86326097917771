"""One decoder layer of the embedded engine over packed tokens and a slotted KV cache: one version in torch for any
device, and one with kernels/cpu/layer.py for float32 on a CPU.

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
from kernels.cpu.library import supports_layer
from kernels.cpu.linear import linear

Cache = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [slots, K, max_context, D]."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of the batch, which attend to the first `length` entries of slots [slot, slot + count)."""

    start: int
    end: int
    slot: int
    count: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Positions of a step's tokens, in the sequences and in the cache. `angles`: cosine and sine float[N, D] of the
    rotary angles.

    `entry`: int64[N], the row at which the first head's K and V of a token are stored in a layer's cache, seen as
    [slots * K * max_context, D]; -1 for padding, which comes after the `stored` tokens.
    Sequences that add one token come first. For these, `first` (int64) is the row at which their slot begins, `length`
    (int64) the number of entries that they attend to, including the new one. `singles` are the segments of these
    sequences (empty for CpuLayer), `longer` those of all other sequences (without a mask for CpuLayer).
    """

    angles: tuple[Tensor, Tensor]
    entry: Tensor
    stored: int
    first: Tensor
    length: Tensor
    singles: Sequence[Segment]
    longer: Sequence[Segment]


class Layer:
    """A text layer with its parallel projections fused; the module's own parameters become views of the fused ones."""

    def __init__(self, module: Any, num_heads: int, num_kv_heads: int, eps: float) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention, self.mlp, self.eps = attention, mlp, eps
        self.input_norm, self.post_norm = module.input_layernorm, module.post_attention_layernorm
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv_weight = _concatenate([p.weight for p in projections])
        self.qkv_bias = None if attention.q_proj.bias is None else _concatenate([p.bias for p in projections])
        dense = hasattr(mlp, "gate_proj")  # a mixture of experts is run by its own module
        self.gate_up_weight = _concatenate([mlp.gate_proj.weight, mlp.up_proj.weight]) if dense else None
        self._norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.qk_norm: Tensor | None = None  # weights of these norms, [H + K, D]
        self.weights_changed()

    def weights_changed(self) -> None:
        """Copy the norms' weights again, repeated for each head."""
        if self._norms is not None:
            heads = (self.num_heads, self.num_kv_heads)
            weights = [norm.weight.detach().expand(n, -1) for norm, n in zip(self._norms, heads, strict=True)]
            self.qk_norm = torch.cat(weights)

    def forward(self, hidden: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Compute the layer: [N, hidden] -> [N, hidden], and store the tokens' K and V in the cache. May write to
        `hidden`."""
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
        """Add `delta` to `hidden` in place; return the RMS norm of the sum."""
        if delta is not None:
            hidden.add_(delta)
        return F.rms_norm(hidden, hidden.shape[-1:], weight, self.eps)

    def rotate_and_store(self, heads: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Norm and rotate the queries and keys in `heads` [N, H + 2 K, D]; store keys and values in the cache. Return
        heads whose first H are the queries."""
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
        """Attend from each token to its sequence: the first H of `heads` -> [N, H * D]."""
        query = heads[:, : self.num_heads]
        out = torch.zeros((len(query), self.num_heads, self.head_dim), dtype=query.dtype, device=query.device)
        for segment in batch.singles:
            self._attend_one_each(query, cache, segment, out)
        for segment in batch.longer:
            self._attend_causally(query, cache, segment, out)
        return out.view(len(query), -1)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Apply the gated activation, SwiGLU or the model's own: [N, 2 * width] -> [N, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.mlp.act_fn(gate) * up

    def _attend_one_each(self, query: Tensor, cache: Cache, s: Segment, out: Tensor) -> None:
        """Attend from one query token in each of several neighbouring slots; heads that share keys are queries of one
        product."""
        first, last = s.slot, s.slot + s.count
        q = query[s.start : s.end].view(s.count, self.num_kv_heads, -1, self.head_dim)
        k, v = (stored[first:last, :, : s.length] for stored in cache)
        part = F.scaled_dot_product_attention(q, k, v, s.mask)
        out[s.start : s.end] = part.view(s.count, self.num_heads, self.head_dim)

    def _attend_causally(self, query: Tensor, cache: Cache, s: Segment, out: Tensor) -> None:
        """Attend from several tokens of one sequence: their rows of query [N, H, D] -> the same rows of out [N, H,
        D]."""
        q = query[s.start : s.end].transpose(0, 1)[None]
        k, v = (stored[s.slot, None, :, : s.length] for stored in cache)
        grouped = self.num_heads > self.num_kv_heads
        part = F.scaled_dot_product_attention(q, k, v, s.mask, is_causal=s.mask is None, enable_gqa=grouped)
        out[s.start : s.end] = part[0].transpose(0, 1)


class CpuLayer(Layer):
    """The same layer with kernels/cpu/layer.py, which reads each sequence's cache by itself, so that it needs no
    neighbouring slots and no masks."""

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
    """Make the layers of transformers' text model: CpuLayer if it supports them, else Layer."""
    heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = text.layers[0].self_attn.head_dim
    supported = supports_layer(text.embed_tokens.weight, *heads, head_dim) and config.hidden_act == "silu"
    kind = CpuLayer if supported else Layer
    return [kind(module, *heads, config.rms_norm_eps) for module in text.layers]


def _concatenate(parameters: list[nn.Parameter]) -> Tensor:
    """Return one tensor with all parameters, which become views of it: writing to a parameter writes to the tensor."""
    fused = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused
