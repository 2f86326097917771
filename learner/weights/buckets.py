"""Whole parameters, one bucket of bounded size at a time; never the whole model in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from learner.lora.adapters import whole
from learner.model.policy import Policy
from shared.weights.families import FAMILIES

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Parameters laid end to end as bytes, without padding: `flat` uint8 [bytes]. `last`: none follows."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor
    last: bool

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """(name, its values as they are sent, one after the other), as views where their place allows it."""
        begin = 0
        for name, dtype_name, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            part = self.flat[begin : begin + math.prod(shape) * dtype.itemsize]
            yield name, (part if begin % dtype.itemsize == 0 else part.clone()).view(dtype)
            begin += len(part)


def gathered(policy: Policy, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters on every rank, named and laid out as the published checkpoints of the model's family are, which
    is what engines and exports take; adapters are merged into theirs. A collective where the policy is sharded.

    `names`: transformers' of the parameters that are wanted; None = all."""
    for name, parameter in policy.named_weights():
        if names is None or name in names:
            tensor = whole(parameter.detach())
            yield published(policy, name, policy.adapters.merged(name, tensor) if policy.adapters else tensor)


def changing(policy: Policy) -> Collection[str] | None:
    """The names of the parameters that training changes; None = all."""
    return policy.adapters.of.keys() if policy.adapters else None


def published(policy: Policy, name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A whole parameter of the policy's model, with its name and in its layout there."""
    family = FAMILIES[policy.vlm.config.model_type]
    return family.published_name(name), tensor.mT if family.is_turned(name) else tensor


def buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int) -> Iterator[Bucket]:
    """Cuts `weights`, cast to `dtype`, into buckets of at most `max_bytes`, or of one parameter that is larger."""
    for named, last in cut(weights, lambda weight: weight[1].numel() * dtype.itemsize, max_bytes):
        yield _bucket([(name, tensor.to(dtype)) for name, tensor in named], last=last)


def cut(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[tuple[list[Item], bool]]:
    """(neighbours whose sizes add up to at most `most`, or one that is larger; whether they are the last)"""
    held: list[Item] = []
    total = 0
    for item in items:
        if held and total + size(item) > most:
            yield held, False
            held, total = [], 0
        held.append(item)
        total += size(item)
    if held:
        yield held, True


def _bucket(named: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    return Bucket(
        names=tuple(name for name, _ in named),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
        flat=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in named]),
        last=last,
    )
