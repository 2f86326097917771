"""Bytes that travel between GPUs for a microbatch, and the seconds they take, from a model's sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from learner.model.memory import FP32, Setting
from learner.model.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank receives for one microbatch's forward and backward."""

    shards: float  # parameters gathered for each, in `dtype_bytes`, and gradients reduced in float32
    context: float  # keys and values of the other ranks that share the microbatch, and their gradients
    experts: float  # rows to the experts of other ranks and back, and their gradients

    @property
    def total(self) -> float:
        return self.shards + self.context + self.experts


def traffic(sizes: ModelSizes, setting: Setting, microbatches: int = 1) -> Traffic:
    """Recomputed activations exchange keys, values and rows once more; parameters are still gathered then.

    `microbatches`: of an update, among which what the replicas add up at its end is shared out.
    """
    times = 3 if setting.activation_checkpointing else 2
    keys_values = 2 * sizes.num_kv_heads * sizes.head_dim * setting.dtype_bytes * sizes.num_layers
    tokens = setting.microbatch_tokens * setting.context
    rows = setting.microbatch_tokens * sizes.experts_per_token * (sizes.num_layers - sizes.num_dense_layers)
    return Traffic(
        shards=_of_shards(sizes, setting, microbatches),
        context=times * keys_values * tokens * _others(setting.context),
        experts=times * 2 * rows * sizes.hidden_size * setting.dtype_bytes * _others(setting.expert),
    )


def _of_shards(sizes: ModelSizes, setting: Setting, microbatches: int) -> float:
    if setting.lora_rank:
        adapters = sizes.adapter_parameters(setting.lora_rank, setting.lora_targets)
        return 2 * setting.dtype_bytes * sizes.parameters * _others(setting.shards) + FP32 * adapters
    each = 2 * setting.dtype_bytes + FP32
    dense, dealt = sizes.parameters - sizes.expert_parameters, sizes.expert_parameters / setting.expert
    travels = each * (dense * _others(setting.shards) + dealt * _others(setting.shards // setting.expert))
    replicas = setting.gpus // setting.shards  # which add up their shards of the gradients: a reduction, a gathering
    return travels + 2 * FP32 * sizes.parameters / setting.shards * _others(replicas) / microbatches


def _others(ranks: int) -> float:
    """The share of a whole that is on the other ranks."""
    return (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class WireTime:
    """Seconds of one microbatch's traffic, by kind."""

    shards: float
    context: float
    experts: float

    def beside(self, computing: float) -> float:
        """Seconds of the microbatch: shards are assumed to travel while others are computed, all else is waited for."""
        return max(computing, self.shards) + self.context + self.experts


def wire_time(found: Traffic, setting: Setting, node: float, net: float) -> WireTime:
    """`node`, `net`: GB a second that a GPU receives within its node and from others. Neighbouring ranks share context
    and experts, so that these stay within a node while they fit into one."""

    def seconds(size: float, ranks: int) -> float:
        return size / (1e9 * (node if ranks <= setting.gpus_per_node else net))

    return WireTime(
        shards=seconds(found.shards, setting.gpus),
        context=seconds(found.context, setting.context),
        experts=seconds(found.experts, setting.expert),
    )
