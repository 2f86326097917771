"""A decoder layer of the embedded engine that is a gated delta net, and the choice of a layer's class.

A slot has, beside the keys and values of the layers that attend, two states of each delta net: the last inputs of its
convolution and the state of its rule. They are those after all tokens that the slot holds, so a slot's content can be
continued, but not cut: another sequence with the same beginning computes it again.

Suffixes: N, R, H, K as in actor/engine/layers.py; C = channels of the convolution, J = its taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actor.engine.layers import Batch, Block, Cache, CpuLayer, GatedLayer, Layer, PairsLayer, concatenated
from kernels.cpu.library import supports_layer
from kernels.cpu.linear import linear
from kernels.delta_rule import gated_delta_rule, gated_norm, log_decay, next_history, one_step, short_conv


class DeltaLayer(Block):
    """A gated delta net. Its cache: the last J-1 inputs of each slot's convolution [slots, J-1, C], and the states of
    its rule, float32 at least [slots, heads, size of a key, size of a value]."""

    def __init__(self, module: Any, eps: float, norm_offset: float = 0.0) -> None:
        super().__init__(module, eps, norm_offset)
        self.net = net = module.linear_attn
        projections = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
        self.weight = concatenated([p.weight for p in projections])
        self.widths = [p.out_features for p in projections]
        self._next: tuple[Tensor, Tensor, Tensor] | None = None  # slots, and both states after the last forward
        self.weights_changed()

    def new_cache(self, num_slots: int, max_context: int) -> Cache:
        net, taps = self.net, self.net.conv_kernel_size
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        history = self.weight.new_zeros(num_slots, taps - 1, net.conv_dim)
        shape = (num_slots, net.num_v_heads, net.head_k_dim, net.head_v_dim)
        return history, self.weight.new_zeros(shape, dtype=wide)

    def keep(self, cache: Cache) -> None:
        if self._next is not None:
            slots, *states = self._next
            for store, state in zip(cache, states, strict=True):
                store.index_copy_(0, slots, state)
            self._next = None

    def mix(self, normed: Tensor, cache: Cache, batch: Batch) -> Tensor:
        """Compute the net; the states are stored by `keep`, so that a forward that fails can be repeated."""
        assert batch.slots is not None and batch.begun is not None
        net, stored = self.net, batch.stored
        mixed, z, b, a = linear(normed, self.weight)[:stored].split(self.widths, 1)
        g = log_decay(a, net.A_log, net.dt_bias)
        history, state = (
            store.index_select(0, batch.slots) * batch.begun.view(-1, *[1] * (store.ndim - 1)) for store in cache
        )
        beta = b.sigmoid()
        singles = len(batch.first)
        parts = []
        if singles:
            parts.append(
                self._one_each(mixed[:singles], g[:singles], beta[:singles], history[:singles], state[:singles])
            )
        if batch.scan is not None:
            conv = net.conv1d.weight.squeeze(1)
            mixed = mixed[singles:]
            heads = self._heads(short_conv(mixed, conv, batch.scan, history[singles:]))
            out, after = gated_delta_rule(*heads, g[singles:], beta[singles:], batch.scan, state[singles:])
            parts.append((out, next_history(mixed, batch.scan, conv.shape[1], history[singles:]), after))
        out, history, state = (torch.cat(each) for each in zip(*parts, strict=True))
        self._next = batch.slots, history.to(cache[0].dtype), state
        gate = z.unflatten(1, (-1, net.head_v_dim))
        gated = gated_norm(out, gate, net.norm.weight, net.norm.variance_epsilon)
        return self._padded(net.out_proj(gated.flatten(1)), len(normed))

    def _one_each(
        self, mixed: Tensor, g: Tensor, beta: Tensor, history: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one token of each of several sequences: (out, next inputs of the convolution, next state)."""
        read = torch.cat((history, mixed[:, None]), 1)
        convolved = F.silu((read * self.net.conv1d.weight.squeeze(1).T).sum(1))
        out, after = one_step(*self._heads(convolved), g, beta, state)
        return out, read[:, 1:], after

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        net = self.net
        query, key, value = mixed.split((net.key_dim, net.key_dim, net.value_dim), 1)
        keys = (-1, net.head_k_dim)
        return query.unflatten(1, keys), key.unflatten(1, keys), value.unflatten(1, (-1, net.head_v_dim))

    @staticmethod
    def _padded(x: Tensor, rows: int) -> Tensor:
        return F.pad(x, (0, 0, 0, rows - len(x))) if len(x) < rows else x


def make_layers(text: Any, config: Any, norm_offset: float = 0.0, *, rotates_pairs: bool = False) -> list[Block]:
    """Make the layers of transformers' text model: CpuLayer if it supports one that attends, else Layer, or GatedLayer
    with a gate and PairsLayer if angles turn pairs; DeltaLayer for a delta net. `norm_offset`, `rotates_pairs`: see
    `ModelFamily`."""
    heads, eps = (config.num_attention_heads, config.num_key_value_heads), config.rms_norm_eps
    layers: list[Block] = []
    for module in text.layers:
        if hasattr(module, "linear_attn"):
            layers.append(DeltaLayer(module, eps, norm_offset))
            continue
        attention = module.self_attn
        gated = attention.q_proj.out_features > attention.o_proj.in_features
        fits = supports_layer(text.embed_tokens.weight, *heads, attention.head_dim) and config.hidden_act == "silu"
        kind = GatedLayer if gated else PairsLayer if rotates_pairs else CpuLayer if fits else Layer
        layers.append(kind(module, *heads, eps, norm_offset))
    return layers
