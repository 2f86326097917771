"""One decoder layer of the embedded engine over packed tokens and a slotted cache: one version in torch for any device,
and one with kernels/cpu/layer.py for float32 on a CPU.

Suffixes: N = new tokens of all sequences, R = sequences, H = query heads, K = key heads, D = head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cpu import layer as cpu_layer
from kernels.cpu.linear import linear
from kernels.delta_rule import ScanPlan

Cache = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [slots, K, max_context, D]; of a delta net see actor/engine/delta_layers.py."""


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

    For models with delta nets: `slots` int64[R] of the rows, `begun` bool[R] says whether a row has entries before, and
    `scan` is the order of computation for the `longer` rows' tokens, None without such rows.
    """

    angles: tuple[Tensor, Tensor]
    entry: Tensor
    stored: int
    first: Tensor
    length: Tensor
    singles: Sequence[Segment]
    longer: Sequence[Segment]
    slots: Tensor | None = None
    begun: Tensor | None = None
    scan: ScanPlan | None = None


class Block(ABC):
    """A text layer: norms, what mixes tokens, and an MLP. Parallel projections are fused, and the module's own
    parameters become views of the fused ones."""

    def __init__(self, module: Any, eps: float, norm_offset: float) -> None:
        self.mlp, self.eps, self.norm_offset = module.mlp, eps, norm_offset
        self._norms = module.input_layernorm, module.post_attention_layernorm
        # Some families norm what a layer adds, too.
        normed = hasattr(module, "post_mlp_layernorm")
        self._added_norms = (module.post_self_attn_layernorm, module.post_mlp_layernorm) if normed else ()
        dense = hasattr(self.mlp, "gate_proj")  # another MLP is run by its own module
        self.gate_up_weight = concatenated([self.mlp.gate_proj.weight, self.mlp.up_proj.weight]) if dense else None

    @abstractmethod
    def new_cache(self, num_slots: int, max_context: int) -> Cache:
        """Make the layer's cache."""

    @abstractmethod
    def mix(self, normed: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Compute what the layer adds before its MLP: [N, hidden] -> [N, hidden]. Store what later tokens need."""

    def keep(self, cache: Cache) -> None:  # noqa: B027 - keys and values are stored at once
        """Store the states after the last forward, if the layer has any, once its tokens are final."""

    def weights_changed(self) -> None:
        """Derive the tensors that depend on the weights again."""
        self.input_weight, self.post_weight = (norm_weight(norm, self.norm_offset) for norm in self._norms)
        self.added_weights = tuple(norm_weight(norm, self.norm_offset) for norm in self._added_norms)

    def forward(self, hidden: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Compute the layer: [N, hidden] -> [N, hidden]. May write to `hidden`."""
        mixed = self.mix(self.add_norm(hidden, None, self.input_weight), cache, batch)
        if self.added_weights:
            mixed = self.add_norm(mixed, None, self.added_weights[0])
        added = self.run_mlp(self.add_norm(hidden, mixed, self.post_weight))
        if self.added_weights:
            added = self.add_norm(added, None, self.added_weights[1])
        return hidden.add_(added)

    def run_mlp(self, normed: Tensor) -> Tensor:
        """Compute the MLP: [N, hidden] -> [N, hidden]."""
        if self.gate_up_weight is None:
            out: Tensor = self.mlp(normed[None])[0]
        else:
            out = self.mlp.down_proj(self.gate(linear(normed, self.gate_up_weight)))
        return out

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place; return the RMS norm of the sum."""
        if delta is not None:
            hidden.add_(delta)
        return rms_norm(hidden, weight, self.eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Apply the gated activation, SwiGLU or the model's own: [N, 2 * width] -> [N, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.mlp.act_fn(gate) * up


class Layer(Block):
    """A layer that attends."""

    def __init__(self, module: Any, num_heads: int, num_kv_heads: int, eps: float, norm_offset: float = 0.0) -> None:
        super().__init__(module, eps, norm_offset)
        self.attention = attention = module.self_attn
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv_weight = concatenated([p.weight for p in projections])
        self.qkv_bias = None if attention.q_proj.bias is None else concatenated([p.bias for p in projections])
        self._head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.qk_norm: Tensor | None = None  # weights of these norms, [H + K, D]
        self.weights_changed()

    def new_cache(self, num_slots: int, max_context: int) -> Cache:
        shape = (num_slots, self.num_kv_heads, max_context, self.head_dim)
        return self.qkv_weight.new_zeros(shape), self.qkv_weight.new_zeros(shape)

    def weights_changed(self) -> None:
        """Copy the norms' weights again, those of heads repeated for each head."""
        super().weights_changed()
        if self._head_norms is not None:
            heads = (self.num_heads, self.num_kv_heads)
            norms = zip(self._head_norms, heads, strict=True)
            self.qk_norm = torch.cat([norm_weight(norm, self.norm_offset).expand(n, -1) for norm, n in norms])

    def mix(self, normed: Tensor, cache: Cache, batch: Batch) -> Tensor:
        heads = linear(normed, self.qkv_weight, self.qkv_bias).view(len(normed), -1, self.head_dim)
        heads = self.rotate_and_store(heads, cache, batch)
        attended: Tensor = self.attention.o_proj(self.attend(heads, cache, batch))
        return attended

    def rotate_and_store(self, heads: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Norm and rotate the queries and keys in `heads` [N, H + 2 K, D]; store keys and values in the cache. Return
        heads whose first H are the queries."""
        num_qk = self.num_heads + self.num_kv_heads
        qk = heads[:, :num_qk]
        if self.qk_norm is not None:
            qk = (F.rms_norm(qk, (self.head_dim,), None, self.eps) * self.qk_norm).to(heads.dtype)
        cos, sin = (angle[:, None] for angle in batch.angles)
        turned, half = qk[..., : cos.shape[-1]], cos.shape[-1] // 2  # a family may rotate a part of each head alone
        turned = turned * cos + self.turned_right(turned) * sin
        qk = torch.cat((turned, qk[..., 2 * half :]), dim=-1) if 2 * half < self.head_dim else turned
        stored, context = batch.stored, cache[0].shape[2]
        offsets = torch.arange(self.num_kv_heads, device=heads.device) * context
        index = (batch.entry[:stored, None] + offsets).reshape(-1)
        for store, new in zip(cache, (qk[:stored, self.num_heads :], heads[:stored, num_qk:]), strict=True):
            store.view(-1, self.head_dim).index_copy_(0, index, new.reshape(-1, self.head_dim))
        return qk

    @staticmethod
    def turned_right(x: Tensor) -> Tensor:
        """Turn the pairs (i, i + D/2) of a head's numbers by a right angle: [..., D] -> [..., D]."""
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def attend(self, heads: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Attend from each token to its sequence: the first H of `heads` -> [N, H * D]."""
        query = heads[:, : self.num_heads]
        out = torch.zeros((len(query), self.num_heads, self.head_dim), dtype=query.dtype, device=query.device)
        for segment in batch.singles:
            self._attend_one_each(query, cache, segment, out)
        for segment in batch.longer:
            self._attend_causally(query, cache, segment, out)
        return out.view(len(query), -1)

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


class GatedLayer(Layer):
    """A layer that attends and multiplies each head's output by a gate, which the projection of queries gives too."""

    def mix(self, normed: Tensor, cache: Cache, batch: Batch) -> Tensor:
        projected = linear(normed, self.qkv_weight, self.qkv_bias).view(len(normed), -1, self.head_dim)
        queries, keys_values = projected.split((2 * self.num_heads, 2 * self.num_kv_heads), 1)
        query, gate = queries.unflatten(1, (-1, 2)).unbind(2)
        heads = self.rotate_and_store(torch.cat((query, keys_values), 1), cache, batch)
        attended: Tensor = self.attention.o_proj(self.attend(heads, cache, batch) * gate.flatten(1).sigmoid())
        return attended


class PairsLayer(Layer):
    """A layer that attends and whose rotary angles turn neighbouring numbers of a head."""

    @staticmethod
    def turned_right(x: Tensor) -> Tensor:
        """Turn the pairs (2 i, 2 i + 1) of a head's numbers by a right angle."""
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


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


def norm_weight(norm: Any, offset: float) -> Tensor:
    """Return what a norm multiplies by: its parameter itself, or in float32 at least the sum of the offset and it."""
    weight: Tensor = norm.weight.detach()
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset if offset else weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute an RMS norm [..., D] in the dtype of the weight, if that is the wider one; return it in that of x."""
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


def concatenated(parameters: list[nn.Parameter]) -> Tensor:
    """Return one tensor with all parameters, which become views of it: writing to a parameter writes to the tensor."""
    fused = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused
