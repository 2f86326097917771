"""Which weights lie beneath adapters: a hash of a model's files that any number of ranks computes alike."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from learner.lora.adapters import is_factor
from learner.model.weight_files import WeightFiles
from shared.weights.families import FAMILIES

TIED = "lm_head.weight"


def base_hash(vlm: Any, path: str, share: tuple[int, int] = (0, 1), group: Any = None) -> str:
    """Of names, shapes, dtypes and bytes of all weights that a model's folder holds, however they are cut into files.

    `share`: this process's rank, and how many share the reading; then a collective of `group`.
    """
    shapes = {name: p.shape for name, p in vlm.named_parameters() if not is_factor(name)}
    files = WeightFiles.open(path, FAMILIES[vlm.config.model_type], shapes, also=(TIED,))
    rank, size = share
    try:
        own = {name: _line(files, name) for name in sorted(shapes)[rank::size]}
    finally:
        files.close()
    found: list[dict[str, str]] = [own]
    if size > 1:
        found = [{} for _ in range(size)]
        dist.all_gather_object(found, own, group=group)
    lines = {name: line for each in found for name, line in each.items()}
    return hashlib.sha256("\n".join(lines[name] for name in sorted(lines)).encode()).hexdigest()[:16]


def _line(files: WeightFiles, name: str) -> str:
    stored = files.stored[name]
    values = files.read(name, tuple(slice(0, size) for size in _own_shape(stored)))
    values = values.mT if stored.transposed else values  # as the file has it
    return f"{name} {stored.dtype} {[*stored.shape]} {xxhash.xxh3_128_hexdigest(_bytes(values))}"


def _own_shape(stored: Any) -> tuple[int, ...]:
    """As the model has it."""
    shape = tuple(stored.shape)
    return (*shape[:-2], shape[-1], shape[-2]) if stored.transposed else shape


def _bytes(values: Tensor) -> memoryview:
    return values.contiguous().flatten().view(torch.uint8).numpy().data
