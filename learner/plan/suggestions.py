"""Suggestions for a learner that does not fit: the first change of its recipe that makes it fit, as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from learner.plan.divisors import deals
from learner.plan.memory_use import Setting, host_memory, memory
from shared.families.model_sizes import ModelSizes

CONTEXTS = (2, 4, 8)  # values that are proposed
LEAST_TOKENS = 1024  # per microbatch


def suggest(sizes: ModelSizes, setting: Setting, room: float, longest: int = 0) -> str:
    """Return, as text, the first change that makes a learner fit. `room`: bytes that a rank may use.

    `longest`: tokens of the longest episode, which one microbatch must hold whatever the recipe says; 0: unknown.
    """

    def fits(changes: Mapping[str, Any]) -> bool:
        return memory(sizes, replace(setting, **changes)).total <= room

    on = {"activation_checkpointing": True}
    smaller = [on | each for each in _microbatches(setting, longest, setting.context)]
    contexts = [c for c in CONTEXTS if c > setting.context and longest and not sizes.num_linear_layers]
    shared = [[on | each for each in _microbatches(setting, longest, context)] for context in contexts]
    here = [each for each in [on, *smaller, *chain(*shared)] if _divides(setting, each)]
    if changes := next(filter(fits, here), None):
        return _in_words(setting, changes)
    for changes in (on, *smaller[-1:], *(made[-1] for made in shared if made)):
        cures = []
        counts = (setting.gpus << i for i in range(12) if _divides(setting, changes, setting.gpus << i))
        counts = (n for n in counts if setting.expert in deals(sizes.num_experts, sizes.expert_rows, n))
        if gpus := next((n for n in counts if fits({**changes, "gpus": n, "shard_size": 0})), 0):
            cures.append(_ranks(setting, gpus))
        if _divides(setting, changes) and fits({**changes, "offload": True}):
            cures.append("set learner.parallel.offload = true")
        if cures:
            either = f"either {' or '.join(cures)}" if cures[1:] else cures[0]
            return " and ".join(filter(None, [_in_words(setting, changes), either]))
    return "use larger GPUs"


def _microbatches(setting: Setting, longest: int, context: int) -> Iterator[dict[str, Any]]:
    """Yield smaller microbatches, the largest first, that hold the longest episode if `context` ranks share each."""
    least = max(LEAST_TOKENS, -(-longest // context))
    for tokens in sorted({least, *(setting.microbatch_tokens >> i for i in range(1, 16))}, reverse=True):
        if least <= tokens < setting.microbatch_tokens:
            yield {"context": context, "microbatch_tokens": tokens}


def _divides(setting: Setting, changes: Mapping[str, Any], gpus: int = 0) -> bool:
    return (gpus or setting.gpus) % changes.get("context", setting.context) == 0


def _in_words(setting: Setting, changes: Mapping[str, Any]) -> str:
    """Return changes as text, without those that are already set."""
    new = {name: value for name, value in changes.items() if getattr(setting, name) != value}
    *first, last = [f"learner.parallel.{name} = {json.dumps(value)}" for name, value in new.items()] or [""]
    return (f"set {', '.join(first)} and {last}" if first else f"set {last}") if last else ""


def _ranks(setting: Setting, gpus: int) -> str:
    """Return, as text, the advice to let so many GPUs share one copy."""
    whole = "learner.parallel.shard_size = 0"
    if gpus == setting.gpus:
        return f"set {whole}"
    return f"use {gpus} GPUs" + (f" with {whole}" if setting.shard_size else "")


def suggest_for_host(sizes: ModelSizes, setting: Setting, room: float) -> str:
    """Return, as text, a change that makes a host's memory suffice. `room`: bytes of a node's host memory."""
    if setting.copies_checkpoint and host_memory(sizes, replace(setting, copies_checkpoint=False)).total <= room:
        return "set learner.checkpoint.in_background = false"
    if setting.offload and host_memory(sizes, replace(setting, offload=False)).total <= room:
        return "set learner.parallel.offload = false"
    return "use more nodes, or fewer and shorter episodes a step"
