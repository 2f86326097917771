"""An adapter sent without the weights: it is merged into the weights that the model was started with, with exactly the
bytes that the learner's own merge gives.

At the first adapter the engine copies each weight that it changes, so that later adapters are merged into the same
original weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actor.engine.weight_loader import Entry, WeightLoader, unflatten
from kernels.low_rank import merged
from shared.engine.adapter_names import SCALE, factor_names, is_of_adapter


@dataclass(frozen=True, slots=True)
class Adapter:
    """A received adapter. `factors`: A and B by the published name of their weight."""

    scale: float
    factors: dict[str, tuple[Tensor, Tensor]]


class AdapterLoader:
    """Checks, collects and merges adapters for the model that `loader` writes into."""

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader
        self._factors = {  # (the weight's name, 0 for A or 1 for B) by the factor's name
            factor_name: (name, factor)
            for name in loader.names
            if loader.own(name).ndim > 1
            for factor, factor_name in enumerate(factor_names(name))
        }
        self._base: dict[str, Tensor] = {}

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise ValueError for a name that belongs to no adapter of this model, for a wrong shape, and for a weight
        that an earlier update has changed."""
        for entry in entries:
            if entry.name == SCALE:
                wanted: tuple[int, ...] = (1,)
            elif entry.name in self._factors:
                name, factor = self._factors[entry.name]
                if name in self._loader.changed and name not in self._base:
                    raise ValueError(f"{name} was changed by an earlier update: start the engine anew for adapters")
                wanted = self._shape(name, factor, entry.shape)
            else:
                raise ValueError(f"the model has no weight for {entry.name!r}")
            if entry.shape != wanted:
                raise ValueError(f"{entry.name} has the shape {[*entry.shape]}, not {[*wanted]}")

    def collected(self, received: Sequence[tuple[Tensor, list[Entry]]]) -> Adapter | None:
        """Return the adapter in an update's buckets; None if they hold weights. Raise ValueError if they hold both, or
        an incomplete adapter."""
        kinds = {is_of_adapter(entry.name) for _, entries in received for entry in entries}
        if True not in kinds:
            return None
        if False in kinds:
            raise ValueError("the update holds an adapter and weights: it is discarded")
        tensors = {name: tensor for flat, entries in received for name, tensor in unflatten(flat, entries)}
        names = {self._factors[name][0] for name in tensors if name != SCALE}
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
        """Copy the weights that `install` will change. If memory runs out here, no weight has changed yet."""
        for name in adapter.factors:
            if name not in self._base:
                self._base[name] = self._loader.own(name).clone()

    @torch.no_grad()
    def install(self, adapter: Adapter) -> None:
        """Set the model's weights to the original ones with this adapter merged in. Call it after `keep_base`."""
        for name, (a, b) in adapter.factors.items():
            weight, base = self._loader.own(name), self._base[name]
            # Copies are aligned in memory like the learner's tensors, for equal rounding.
            a, b = (x.to(base.dtype, copy=True) for x in (a, b))
            weight.copy_(merged(base, a, b, adapter.scale))
        for name in self._base.keys() - adapter.factors.keys():
            self._loader.own(name).copy_(self._base[name])

    def _shape(self, name: str, factor: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the expected shape of this weight's factor (0 = A, 1 = B), with the rank taken from the received
        `shape`."""
        *stack, rows, columns = self._loader.own(name).shape
        if len(shape) != len(stack) + 2:
            return (*stack, 0, columns) if factor == 0 else (*stack, rows, 0)
        return (*stack, shape[-2], columns) if factor == 0 else (*stack, rows, shape[-1])
