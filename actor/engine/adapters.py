"""An adapter sent alone: merged into the weights that the model was started with, to the learner's very bytes.

The first adapter has the engine keep a copy of each weight that it changes, so that every later one is merged into the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actor.engine.weight_loader import Entry, WeightLoader, unflatten
from kernels.low_rank import merged
from shared.weights.adapters import SCALE, factor_names, is_of_adapter


@dataclass(frozen=True, slots=True)
class Adapter:
    """`factors`: A and B by the published name of the weight."""

    scale: float
    factors: dict[str, tuple[Tensor, Tensor]]


class AdapterLoader:
    """Of the model that `loader` writes into."""

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader
        self._places = {
            factor: (name, place)
            for name in loader.names
            if loader.own(name).ndim > 1
            for place, factor in enumerate(factor_names(name))
        }
        self._base: dict[str, Tensor] = {}

    def check(self, entries: Sequence[Entry]) -> None:
        """ValueError for a name that is no part of an adapter of this model, for another shape, and for a weight that
        is no longer the one that the model was started with."""
        for entry in entries:
            if entry.name == SCALE:
                wanted: tuple[int, ...] = (1,)
            elif entry.name in self._places:
                name, place = self._places[entry.name]
                if name in self._loader.changed and name not in self._base:
                    raise ValueError(f"{name} was changed by an earlier update: start the engine anew for adapters")
                wanted = self._shape(name, place, entry.shape)
            else:
                raise ValueError(f"the model has no weight for {entry.name!r}")
            if entry.shape != wanted:
                raise ValueError(f"{entry.name} has the shape {[*entry.shape]}, not {[*wanted]}")

    def collected(self, received: Sequence[tuple[Tensor, list[Entry]]]) -> Adapter | None:
        """The adapter that an update's buckets hold; None where they hold weights. ValueError for both in one, and for
        half an adapter."""
        kinds = {is_of_adapter(entry.name) for _, entries in received for entry in entries}
        if True not in kinds:
            return None
        if False in kinds:
            raise ValueError("the update holds an adapter and weights: it is discarded")
        tensors = {name: tensor for flat, entries in received for name, tensor in unflatten(flat, entries)}
        names = {self._places[name][0] for name in tensors if name != SCALE}
        wanted = {SCALE, *(factor for name in names for factor in factor_names(name))}
        if missing := sorted(wanted - tensors.keys()):
            raise ValueError(f"the adapter lacks {missing[0]}: it is discarded")
        pairs = {name: (tensors[a], tensors[b]) for name in names for a, b in [factor_names(name)]}
        for name, (a, b) in pairs.items():
            if a.shape[-2] != b.shape[-1]:
                raise ValueError(f"the factors of {name} have the ranks {a.shape[-2]} and {b.shape[-1]}")
        return Adapter(float(tensors[SCALE]), pairs)

    @torch.no_grad()
    def keep_base(self, adapter: Adapter) -> None:
        """Copies the weights that `install` will change; memory that is short for that has changed none of them."""
        for name in adapter.factors:
            if name not in self._base:
                self._base[name] = self._loader.own(name).clone()

    @torch.no_grad()
    def install(self, adapter: Adapter) -> None:
        """After `keep_base`. Then the model's weights are those that it was started with and this adapter."""
        for name, (a, b) in adapter.factors.items():
            own, base = self._loader.own(name), self._base[name]
            a, b = (x.to(base.dtype, copy=True) for x in (a, b))  # as the learner's, they begin at a whole address
            own.copy_(merged(base, a, b, adapter.scale))
        for name in self._base.keys() - adapter.factors.keys():
            self._loader.own(name).copy_(self._base[name])

    def _shape(self, name: str, place: int, found: tuple[int, ...]) -> tuple[int, ...]:
        """Of A or B of this weight, with the rank that was `found`."""
        *stack, rows, columns = self._loader.own(name).shape
        if len(found) != len(stack) + 2:
            return (*stack, 0, columns) if place == 0 else (*stack, rows, 0)
        return (*stack, found[-2], columns) if place == 0 else (*stack, rows, found[-1])
