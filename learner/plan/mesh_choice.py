"""The choice of a mesh for a model, a context length and a number of GPUs: the fastest that fits, by calculation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from learner.plan.divisors import deals
from learner.plan.duration import Speed, offload_time, step_time
from learner.plan.memory_use import Setting, memory
from learner.plan.traffic import Traffic, WireTime, traffic, wire_time
from shared.families.model_sizes import ModelSizes

MOST_CONTEXT = 32
LEAST_MICROBATCH = 8192  # tokens per rank; with fewer, matrix products are too small to be efficient


@dataclass(frozen=True, slots=True)
class Choice:
    """One mesh: the memory of a rank, the traffic of a microbatch, and the seconds of a step."""

    setting: Setting
    bytes_of_rank: float
    sent: Traffic
    wire: WireTime  # time of one microbatch's traffic
    computing: float  # seconds of a step; at least those of the longest episode on its ranks
    seconds: float

    def __str__(self) -> str:
        s = self.setting
        parts = [f"context {s.context}"] + ([f"expert {s.expert}"] if s.expert > 1 else [])
        parts += [f"shard_size {s.shard_size}"] if s.shard_size else []
        parts += [f"microbatch_tokens {s.microbatch_tokens}"]
        parts += ["activation_checkpointing"] if s.activation_checkpointing else []
        parts += ["offload"] if s.offload else []
        return (
            f"{', '.join(parts)}: {self.seconds:.1f} s a step ({self.computing:.1f} computing), "
            f"{self.bytes_of_rank / 1e9:.1f} GB a rank; a microbatch receives {self.sent.shards / 1e9:.0f} GB of "
            f"shards, {self.sent.context / 1e9:.1f} of keys and values, {self.sent.experts / 1e9:.1f} of experts' rows"
        )


def choices(
    sizes: ModelSizes,
    setting: Setting,
    longest: int,
    room: float,
    speed: Speed,
    fixed: Mapping[str, Any] | None = None,
) -> list[Choice]:
    """Return the meshes that fit into `room` bytes, fastest first, among equals those with less memory.

    `longest`: tokens of the longest episode, which one microbatch has to hold. `setting` gives all fields that are not
    chosen; `fixed` gives values of fields that would otherwise be chosen.
    """
    settings = dict.fromkeys(_settings(sizes, setting, longest, fixed or {}))
    fitting = [judged(sizes, each, longest, speed) for each in settings if memory(sizes, each).total <= room]
    return sorted(fitting, key=lambda c: (round(c.seconds, 2), c.bytes_of_rank))


def judged(sizes: ModelSizes, setting: Setting, longest: int, speed: Speed) -> Choice:
    alone = replace(setting, gpus=setting.context, episodes=1, episode_tokens=longest)
    computing = max(step_time(sizes, each, speed).seconds for each in (setting, alone))
    tokens = setting.episodes * setting.episode_tokens * setting.passes
    # microbatches of each group of ranks that share them
    count = ceil(tokens / (setting.gpus * setting.microbatch_tokens))
    sent = traffic(sizes, setting, max(count // setting.passes, 1))
    wire = wire_time(sent, setting, speed.node, speed.net)
    seconds = count * (wire.beside(computing / count) + offload_time(sizes, setting, speed))
    return Choice(setting, memory(sizes, setting).total, sent, wire, computing, seconds)


def _settings(sizes: ModelSizes, setting: Setting, longest: int, fixed: Mapping[str, Any]) -> Iterator[Setting]:
    node, given = setting.gpus_per_node, fixed.get("microbatch_tokens", 0)
    whole = {0} | ({node} if setting.gpus > node and setting.gpus % node == 0 else set())
    for shard_size in [fixed["shard_size"]] if "shard_size" in fixed else sorted(whole):
        shards = shard_size or setting.gpus
        for context in [fixed["context"]] if "context" in fixed else _contexts(sizes):
            if setting.gpus % shards or setting.gpus % context:
                continue
            # Adapters and dealt experts exclude each other.
            for expert in [1] if setting.lora_rank else _deals(sizes, shards):
                tokens = max(ceil(longest / context), given or min(LEAST_MICROBATCH, setting.microbatch_tokens))
                made = replace(setting, shard_size=shard_size, context=context, expert=expert, microbatch_tokens=tokens)
                if expert == fixed.get("expert", expert):
                    again = fixed.get("activation_checkpointing")
                    for each in (False, True) if again is None else (again,):
                        yield replace(made, activation_checkpointing=each)


def _contexts(sizes: ModelSizes) -> list[int]:
    """Return the numbers of ranks that can share a microbatch: a recurrence is not divided."""
    return [1] if sizes.num_linear_layers else _powers(MOST_CONTEXT)


def _deals(sizes: ModelSizes, ranks: int) -> list[int]:
    powers = _powers(ranks)
    return [n for n in deals(sizes.num_experts, sizes.expert_rows, ranks) if n in powers]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
