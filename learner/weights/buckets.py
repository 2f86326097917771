"""Whole parameters, one bucket of bounded size at a time; never the whole model in one place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.lora.adapters import whole
from learner.model.policy import Policy
from shared.weights.adapters import SCALE, factor_names
from shared.weights.families import FAMILIES


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


def outgoing(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """What a publication sends: the parameters that training changes, or the adapters alone that change them. A
    collective where the policy is sharded."""
    adapters = policy.adapters
    if adapters is None or not adapters.alone:
        yield from gathered(policy, changing(policy))
        return
    family = FAMILIES[policy.vlm.config.model_type]
    for number, (name, each) in enumerate(adapters.of.items()):
        factors = [whole(factor.detach()) for factor in each.factors]
        if number == 0:
            yield SCALE, torch.tensor([adapters.scale], dtype=torch.float64, device=factors[0].device)
        yield from zip(factor_names(family.published_name(name)), factors, strict=True)


def published(policy: Policy, name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A whole parameter of the policy's model, with its name and in its layout there."""
    family = FAMILIES[policy.vlm.config.model_type]
    return family.published_name(name), tensor.mT if family.is_turned(name) else tensor


def buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int) -> Iterator[Bucket]:
    """Cuts `weights`, cast to `dtype` but for an adapter's scale, into buckets of at most `max_bytes`, or of one
    parameter that is larger."""
    held: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        tensor = tensor if name == SCALE else tensor.to(dtype)
        size = tensor.nbytes
        if held and num_bytes + size > max_bytes:
            yield _bucket(held, last=False)
            held, num_bytes = [], 0
        held.append((name, tensor))
        num_bytes += size
    if held:
        yield _bucket(held, last=True)


def _bucket(named: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    return Bucket(
        names=tuple(name for name, _ in named),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
        flat=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in named]),
        last=last,
    )
