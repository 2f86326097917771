"""The model of the embedded engine: modules of transformers' Qwen-VL models, run with a slotted KV cache over packed
tokens.

One call computes the new tokens of many sequences laid end to end: one token for a sequence that decodes, a whole
prompt for one that begins. All linear layers see one [N, hidden] matrix without padding; attention runs per segment.

Suffixes: N = new tokens of all sequences, R = sequences, D = head size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actor.engine.towers.families import TOWERS
from kernels.cpu_linear import linear, padded, use_fast_linear
from shared.vision import VisionSpec


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What one sequence adds: `token_ids` int64[n] and `positions` int64[3, n], after `past` tokens in `slot`.

    `visual` int64[m] says which of the n tokens are visual tokens, `features` (level 0 is the embedding, then one
    tensor per deepstack layer, each [m, hidden]) what they are.
    """

    slot: int
    past: int
    token_ids: np.ndarray
    positions: np.ndarray
    visual: np.ndarray | None = None
    features: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of the batch attend over slots [slot, slot + count), the first `length` entries of each."""

    start: int
    end: int
    slot: int
    count: int
    length: int
    mask: Tensor | None


class Runner:
    """Owns the weights and the KV cache. Not thread-safe: one thread calls it."""

    def __init__(self, model: Any, spec: VisionSpec, *, num_slots: int, max_context: int) -> None:
        self.model = model.eval()
        use_fast_linear(model)
        self.num_slots, self.max_context = num_slots, max_context
        text = model.config.get_text_config()
        self.text, self.lm_head = model.model.language_model, model.lm_head
        self.head_dim = self.text.layers[0].self_attn.head_dim
        self.num_heads, self.num_kv_heads = text.num_attention_heads, text.num_key_value_heads
        weight = self.text.embed_tokens.weight
        self.device, self.dtype, self.vocab_size = weight.device, weight.dtype, text.vocab_size
        self.eps = text.rms_norm_eps
        self.tower = TOWERS[model.config.model_type](model.model.visual, spec)
        shape = (num_slots, self.num_kv_heads, max_context, self.head_dim)
        self.cache = [
            tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv") for _ in self.text.layers
        ]
        self.layers = [_fuse(layer) for layer in self.text.layers]
        self.weights_changed()

    def weights_changed(self) -> None:
        """Recomputes what is derived from the parameters; call it after writing to them."""
        heads = (self.num_heads, self.num_kv_heads)
        for layer in self.layers:
            if layer.norms is not None:
                weights = [norm.weight.detach().expand(n, -1) for norm, n in zip(layer.norms, heads, strict=True)]
                layer.qk_norm = torch.cat(weights)
        self.tower.weights_changed()

    @torch.inference_mode()
    def encode(self, patches: Sequence[np.ndarray], grids: Sequence[tuple[int, int, int]]) -> list[tuple[Tensor, ...]]:
        """Features of images: per image the embedding and the deepstack levels, each [tokens, hidden]."""
        return self.tower.encode(patches, grids)

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` KV entries of one slot to another."""
        for keys, values in self.cache:
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Computes and caches the rows' tokens; fp32 logits [R, V] after the last token of each.

        Rows of one token must come first and be sorted by slot: neighbours in the cache are then computed together.
        """
        counts = [len(row.token_ids) for row in rows]
        num_tokens = sum(counts)
        extra = padded(num_tokens) - num_tokens
        zeros = np.zeros(extra, dtype=np.int64)
        ids = self._tensor(np.concatenate([*(row.token_ids for row in rows), zeros]))
        axes = [*(row.positions for row in rows), np.broadcast_to(zeros, (3, extra))]
        positions = self._tensor(np.concatenate(axes, axis=1))
        cache_index = self._cache_index(rows, counts)
        segments = self._segments(rows, counts)
        ends = np.cumsum(counts)

        hidden = F.embedding(ids, self.text.embed_tokens.weight)
        visual, features = self._visual(rows, ends - counts)
        if visual is not None:
            hidden.index_copy_(0, visual, features[0])
        cos, sin = self.text.rotary_emb(hidden, positions[:, None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        for depth, layer in enumerate(self.layers):
            hidden = self._layer(layer, self.cache[depth], hidden, cos, sin, cache_index, segments)
            if visual is not None and depth + 1 < len(features):
                hidden.index_add_(0, visual, features[depth + 1])
        last = np.full(padded(len(rows)), ends[-1] - 1)
        last[: len(rows)] = ends - 1
        hidden = F.rms_norm(hidden[self._tensor(last)], hidden.shape[-1:], self.text.norm.weight, self.eps)
        return self.lm_head(hidden)[: len(rows)].float()

    def _cache_index(self, rows: Sequence[Row], counts: list[int]) -> Tensor:
        """int64[N * kv heads]: where the new K and V go in a layer's cache, seen as [slots * kv heads * context, D]."""
        starts = np.array([row.slot * self.num_kv_heads * self.max_context + row.past for row in rows])
        offsets = np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
        heads = np.arange(self.num_kv_heads) * self.max_context
        return self._tensor(((np.repeat(starts, counts) + offsets)[:, None] + heads).reshape(-1))

    def _layer(
        self,
        layer: _Layer,
        cache: tuple[Tensor, ...],
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache_index: Tensor,
        segments: list[Segment],
    ) -> Tensor:
        n, width = hidden.shape
        stored = len(cache_index) // self.num_kv_heads
        normed = F.rms_norm(hidden, (width,), layer.input_norm.weight, self.eps)
        heads = linear(normed, layer.qkv_weight, layer.qkv_bias).view(n, -1, self.head_dim)
        num_qk = self.num_heads + self.num_kv_heads
        qk = heads[:, :num_qk]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), None, self.eps) * layer.qk_norm
        half = self.head_dim // 2
        qk = qk * cos + torch.cat((-qk[..., half:], qk[..., :half]), dim=-1) * sin
        keys, values = cache
        for store, new in ((keys, qk[:stored, self.num_heads :]), (values, heads[:stored, num_qk:])):
            store.view(-1, self.head_dim).index_copy_(0, cache_index, new.reshape(-1, self.head_dim))
        attended = self._attend(qk[:, : self.num_heads], keys, values, segments)
        hidden = hidden + layer.attention.o_proj(attended)
        normed = F.rms_norm(hidden, (width,), layer.post_norm.weight, self.eps)
        if layer.gate_up_weight is None:
            return hidden + layer.mlp(normed[None])[0]
        gate, up = linear(normed, layer.gate_up_weight).chunk(2, dim=-1)
        return hidden + layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, segments: list[Segment]) -> Tensor:
        out = torch.zeros((len(query), self.num_heads, self.head_dim), dtype=query.dtype, device=query.device)
        group = self.num_heads // self.num_kv_heads
        for s in segments:
            if s.end - s.start == s.count:
                part = self._attend_one_each(query[s.start : s.end], keys, values, s)
                out[s.start : s.end] = part.view(s.count, self.num_heads, self.head_dim)
            else:
                q = query[s.start : s.end].transpose(0, 1)[None]
                k, v = keys[s.slot, None, :, : s.length], values[s.slot, None, :, : s.length]
                causal = s.mask is None
                part = F.scaled_dot_product_attention(q, k, v, s.mask, is_causal=causal, enable_gqa=group > 1)
                out[s.start : s.end] = part[0].transpose(0, 1)
        return out.view(len(query), -1)

    def _attend_one_each(self, query: Tensor, keys: Tensor, values: Tensor, s: Segment) -> Tensor:
        """Neighbouring slots with one query token each; the heads that share keys are the queries of one product."""
        first, last = s.slot, s.slot + s.count
        q = query.view(s.count, self.num_kv_heads, -1, self.head_dim)
        k, v = keys[first:last, :, : s.length], values[first:last, :, : s.length]
        return F.scaled_dot_product_attention(q, k, v, s.mask)

    def _segments(self, rows: Sequence[Row], counts: list[int]) -> list[Segment]:
        """Runs of neighbouring slots that decode, then one segment per longer row."""
        segments: list[Segment] = []
        first = 0
        while first < len(rows) and counts[first] == 1:
            last = first + 1
            while last < len(rows) and counts[last] == 1 and rows[last].slot == rows[last - 1].slot + 1:
                last += 1
            segments.append(self._decode_segment(rows, first, last))
            first = last
        start = first
        for row, n in zip(rows[first:], counts[first:], strict=True):
            segments.append(Segment(start, start + n, row.slot, 1, row.past + n, self._causal_mask(row.past, n)))
            start += n
        return segments

    def _decode_segment(self, rows: Sequence[Row], first: int, last: int) -> Segment:
        lengths = [row.past + 1 for row in rows[first:last]]
        longest = max(lengths)
        mask = None
        if min(lengths) < longest:
            unseen = np.arange(longest)[None] >= np.asarray(lengths)[:, None]
            mask = self._tensor(np.where(unseen, np.float32(-np.inf), np.float32(0)))[:, None, None].to(self.dtype)
        return Segment(first, last, rows[first].slot, last - first, longest, mask)

    def _causal_mask(self, past: int, n: int) -> Tensor | None:
        """[n, past + n] additive, or None where plain causality is enough (nothing past, or one token)."""
        if past == 0 or n == 1:
            return None
        mask = torch.zeros((n, past + n), dtype=self.dtype, device=self.device)
        mask[:, past:] = torch.full((n, n), -torch.inf, dtype=self.dtype, device=self.device).triu_(1)
        return mask

    def _visual(self, rows: Sequence[Row], starts: np.ndarray) -> tuple[Tensor | None, list[Tensor]]:
        found = [
            (row, start) for row, start in zip(rows, starts, strict=True) if row.visual is not None and row.features
        ]
        if not found:
            return None, []
        index = np.concatenate([row.visual + start for row, start in found])
        levels = zip(*(row.features for row, _ in found), strict=True)
        return self._tensor(index), [torch.cat(level).to(self.dtype) for level in levels]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


@dataclass(slots=True, eq=False)
class _Layer:
    """A text layer with its parallel projections fused; the module's own parameters become views of the fused.

    `norms`: of queries and of keys, None for a family that has none; `qk_norm`: their weights, [heads of both, D].
    """

    attention: Any
    mlp: Any
    input_norm: Any
    post_norm: Any
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    gate_up_weight: Tensor | None
    norms: tuple[Any, Any] | None
    qk_norm: Tensor | None = None


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    dense = hasattr(mlp, "gate_proj")  # a mixture of experts runs as it is
    return _Layer(
        attention=attention,
        mlp=mlp,
        input_norm=layer.input_layernorm,
        post_norm=layer.post_attention_layernorm,
        qkv_weight=_concatenate([p.weight for p in projections]),
        qkv_bias=None if attention.q_proj.bias is None else _concatenate([p.bias for p in projections]),
        gate_up_weight=_concatenate([mlp.gate_proj.weight, mlp.up_proj.weight]) if dense else None,
        norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
    )


def _concatenate(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor that the parameters share from now on: writing to a parameter writes to it."""
    fused = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused
