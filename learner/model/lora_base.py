"""The identity of the weights beneath adapters: a hash of a model's files that is the same for any number of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from learner.model.lora_adapters import is_factor
from learner.model.weight_files import WeightFiles
from shared.families.registry import FAMILIES

TIED = "lm_head.weight"


def base_hash(vlm: Any, path: str, share: tuple[int, int] = (0, 1), group: Any = None) -> str:
    """Return a hash of the names, shapes, dtypes and bytes of all weights in a model's folder, however they are split
    into files.

    `share`: this process's rank and the number of processes that share the reading. With more than one, this is a
    collective of `group`.
    """
    shapes = {name: p.shape for name, p in vlm.named_parameters() if not is_factor(name)}
    files = WeightFiles.open(path, FAMILIES[vlm.config.model_type], shapes, also=(TIED,))
    rank, size = share
    try:
        own = {name: _line(files, name) for name in sorted(shapes)[rank::size]}
    finally:
        files.close()
    lines_of_ranks: list[dict[str, str]] = [own]
    if size > 1:
        lines_of_ranks = [{} for _ in range(size)]
        dist.all_gather_object(lines_of_ranks, own, group=group)
    lines = {name: line for each in lines_of_ranks for name, line in each.items()}
    return hashlib.sha256("\n".join(lines[name] for name in sorted(lines)).encode()).hexdigest()[:16]


def _line(files: WeightFiles, name: str) -> str:
    stored = files.stored[name]
    values = files.read(name, tuple(slice(0, size) for size in _own_shape(stored)))
    values = values.mT if stored.transposed else values  # in the file's layout
    return f"{name} {stored.dtype} {[*stored.shape]} {xxhash.xxh3_128_hexdigest(_bytes(values))}"


def _own_shape(stored: Any) -> tuple[int, ...]:
    """Return the shape in the model's layout."""
    shape = tuple(stored.shape)
    return (*shape[:-2], shape[-1], shape[-2]) if stored.transposed else shape


def _bytes(values: Tensor) -> memoryview:
    return values.contiguous().flatten().view(torch.uint8).numpy().data
