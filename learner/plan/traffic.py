"""Bytes that are sent between GPUs for a microbatch, and the seconds this takes, from a model's sizes only."""

from __future__ import annotations

from dataclasses import dataclass

from learner.plan.memory_use import FP32, Setting
from shared.families.model_sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank receives for one microbatch's forward and backward."""

    shards: float  # parameters, gathered for each pass in `dtype_bytes`, and gradients, reduced in float32
    context: float  # keys and values from the other ranks that share the microbatch, and their gradients
    experts: float  # rows to the experts of other ranks and back, and their gradients

    @property
    def total(self) -> float:
        return self.shards + self.context + self.experts


def traffic(sizes: ModelSizes, setting: Setting, microbatches: int = 1) -> Traffic:
    """Return the bytes that a rank receives for one microbatch.

    If activations are recomputed, keys, values and rows are exchanged once more; parameters are still gathered then.
    `microbatches`: number in an update; the sum over replicas at its end is divided among them.
    """
    times = 3 if setting.activation_checkpointing else 2
    keys_values = 2 * sizes.num_kv_heads * sizes.head_dim * setting.dtype_bytes * sizes.num_attention_layers
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
    replicas = setting.gpus // setting.shards  # they sum their shards of the gradients: one reduction and one gathering
    return travels + 2 * FP32 * sizes.parameters / setting.shards * _others(replicas) / microbatches


def _others(ranks: int) -> float:
    """Return the share of a whole that is on the other ranks."""
    return (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class WireTime:
    """Seconds of one microbatch's traffic, by kind."""

    shards: float
    context: float
    experts: float

    def beside(self, computing: float) -> float:
        """Return the seconds of the microbatch. Shards are assumed to be sent during the computation; all else is
        waited for."""
        return max(computing, self.shards) + self.context + self.experts


def wire_time(sent: Traffic, setting: Setting, node: float, net: float) -> WireTime:
    """Return the seconds of a microbatch's traffic.

    `node`, `net`: GB per second that a GPU receives within its node, and from other nodes. Neighbouring ranks share
    context and experts, so this traffic stays within a node if the ranks fit into one.
    """

    def seconds(size: float, ranks: int) -> float:
        return size / (1e9 * (node if ranks <= setting.gpus_per_node else net))

    return WireTime(
        shards=seconds(sent.shards, setting.gpus),
        context=seconds(sent.context, setting.context),
        experts=seconds(sent.experts, setting.expert),
    )
