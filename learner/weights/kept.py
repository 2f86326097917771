"""What the learner knows of an engine's sampled parameters: the bytes that were sent, as the engine lays them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from learner.weights.gpu_hash import MAX_BYTES, gpu_hash
from learner.weights.shards import EXPERTS, Heads, held
from shared.weights.checksums import checksums, engine_name
from shared.weights.layout import Layout

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNTOLD = "it does not tell how it holds them"
_TOO_LARGE = f"SGLang hashes no parameter of {MAX_BYTES >> 30} GB or more on a GPU"

Sums = tuple[dict[str, str], ...]
"""Checksums by the server's names, of each tensor-parallel rank."""


class KeptWeights:
    """The sampled parameters of one publication, by the published names; `compare` tells whether an engine has them."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._values: dict[str, Tensor] = {}
        self._sums: dict[tuple[Layout, torch.dtype], Sums] = {}

    def keep(self, name: str, values: Tensor) -> None:
        """`values` in the shape that engines hold."""
        self._values[name] = values

    def clear(self) -> None:
        self._values.clear()
        self._sums.clear()

    def compare(
        self, theirs: Sequence[Mapping[str, str]] | None, layout: Layout, dtype: torch.dtype
    ) -> tuple[list[str], dict[str, str]]:
        """The server's parameters that differ from what was sent as `dtype`, and why others cannot be compared: what
        the engine does not tell, or whose layout or checksum the learner does not know."""
        every = {engine_name(name) for name in self._values}
        if why := layout.unknown or ("" if layout.hashed else _UNTOLD):
            return [], dict.fromkeys(every, why)
        if theirs is None or len(theirs) != layout.num_ranks:
            return [], dict.fromkeys(every, f"it tells no checksums of {layout.num_ranks} ranks")
        own = self._own(layout, dtype)
        unknown = {name: self._why(name, layout) for name in every if not all(name in sums for sums in own)}
        unknown |= dict.fromkeys(
            (name for name in every - unknown.keys() if not all(name in sums for sums in theirs)), "it does not tell it"
        )
        different = sorted(every - unknown.keys())
        for cast in (dtype, *_DTYPES):  # the engine may hold what it was sent in a dtype of its own
            if different:
                pairs = list(zip(self._own(layout, cast), theirs, strict=True))
                different = [name for name in different if any(mine[name] != its[name] for mine, its in pairs)]
        return different, unknown

    def laid_out(self, layout: Layout, rank: int) -> dict[str, Tensor]:
        """By the server's names, all that the rank holds; without those whose layout is not known."""
        return dict(_joined(self._parts(layout, rank)))

    # ------------------------------------------------------------------ what it is made of

    def _own(self, layout: Layout, dtype: torch.dtype) -> Sums:
        """Once for all engines of a layout."""
        if (layout, dtype) not in self._sums:
            ranks = range(layout.num_ranks)
            self._sums[layout, dtype] = tuple(self._hashed(layout, dtype, rank) for rank in ranks)
        return self._sums[layout, dtype]

    def _hashed(self, layout: Layout, dtype: torch.dtype, rank: int) -> dict[str, str]:
        parts = ((name, values.to(dtype)) for name, values in self._parts(layout, rank))
        if layout.hashed == "sha256":
            return checksums((name, part.cpu().flatten().view(torch.uint8).numpy().data) for name, part in parts)
        return {name: gpu_hash(values) for name, values in _joined(parts) if values.nbytes < MAX_BYTES}

    def _parts(self, layout: Layout, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Of each published name, what the rank holds."""
        for name, values in self._values.items():
            if EXPERTS in name and layout.unknown_experts:
                continue
            part = held(name, values, layout, self._heads, rank)
            if part is not None:
                yield name, part

    def _why(self, name: str, layout: Layout) -> str:
        """A parameter has no checksum of ours."""
        if EXPERTS in name and layout.unknown_experts:
            return layout.unknown_experts
        return _TOO_LARGE if name in self.laid_out(layout, 0) else "no rule says how it is cut"


def _joined(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(the server's name, all that it holds under it) from Hugging Face names in the model's order."""
    parts: dict[str, list[Tensor]] = {}
    for name, values in weights:
        parts.setdefault(engine_name(name), []).append(values)
    return ((name, torch.cat(part) if len(part) > 1 else part[0]) for name, part in parts.items())
