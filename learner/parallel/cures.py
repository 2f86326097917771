"""What would make a learner fit that does not: the first change of its recipe, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from learner.model.memory import Setting, host_memory, memory
from learner.model.sizes import ModelSizes
from learner.parallel.divisors import deals

CONTEXTS = (2, 4, 8)  # that are proposed
LEAST_TOKENS = 1024  # of a microbatch


def cure(sizes: ModelSizes, setting: Setting, room: float, longest: int = 0) -> str:
    """`room`: bytes that a rank may use. `longest`: tokens of the longest episode, which one microbatch holds whatever
    the recipe says of it; 0: not known."""

    def fits(changes: Mapping[str, Any]) -> bool:
        return memory(sizes, replace(setting, **changes)).total <= room

    on = {"activation_checkpointing": True}
    smaller = [on | each for each in _microbatches(setting, longest, setting.context)]
    contexts = [c for c in CONTEXTS if c > setting.context and longest]
    shared = [[on | each for each in _microbatches(setting, longest, context)] for context in contexts]
    here = [each for each in [on, *smaller, *chain(*shared)] if _divides(setting, each)]
    if found := next(filter(fits, here), None):
        return _said(setting, found)
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
            return " and ".join(filter(None, [_said(setting, changes), either]))
    return "use larger GPUs"


def _microbatches(setting: Setting, longest: int, context: int) -> Iterator[dict[str, Any]]:
    """Smaller ones, the largest first, that hold the longest episode where `context` ranks share each."""
    least = max(LEAST_TOKENS, -(-longest // context))
    for tokens in sorted({least, *(setting.microbatch_tokens >> i for i in range(1, 16))}, reverse=True):
        if least <= tokens < setting.microbatch_tokens:
            yield {"context": context, "microbatch_tokens": tokens}


def _divides(setting: Setting, changes: Mapping[str, Any], gpus: int = 0) -> bool:
    return (gpus or setting.gpus) % changes.get("context", setting.context) == 0


def _said(setting: Setting, changes: Mapping[str, Any]) -> str:
    """Nothing of what is so already."""
    new = {name: value for name, value in changes.items() if getattr(setting, name) != value}
    *first, last = [f"learner.parallel.{name} = {json.dumps(value)}" for name, value in new.items()] or [""]
    return (f"set {', '.join(first)} and {last}" if first else f"set {last}") if last else ""


def _ranks(setting: Setting, gpus: int) -> str:
    """So many that all share one copy."""
    whole = "learner.parallel.shard_size = 0"
    if gpus == setting.gpus:
        return f"set {whole}"
    return f"use {gpus} GPUs" + (f" with {whole}" if setting.shard_size else "")


def host_cure(sizes: ModelSizes, setting: Setting, room: float) -> str:
    """`room`: bytes of a node's host."""
    if setting.copies_checkpoint and host_memory(sizes, replace(setting, copies_checkpoint=False)).total <= room:
        return "set learner.checkpoint.in_background = false"
    if setting.offload and host_memory(sizes, replace(setting, offload=False)).total <= room:
        return "set learner.parallel.offload = false"
    return "use more nodes, or fewer and shorter episodes a step"
