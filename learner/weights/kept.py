"""What the learner knows of an engine's sampled parameters: the bytes that were sent, as the engine lays them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from learner.weights.gpu_hash import MAX_BYTES, gpu_hash
from shared.weights.checksums import checksums, engine_name
from shared.weights.layout import Layout

_VOCABULARIES = ("embed_tokens.weight", "lm_head.weight", "pos_embed.weight")
VOCABULARY_UNIT = 64  # a server fills these up to a multiple of it
EXPERTS = ".mlp.experts."  # a server on a GPU lays these out as its kernels want them
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Sums = tuple[dict[str, str], ...]
"""Checksums by the server's names, of each tensor-parallel rank."""


class KeptWeights:
    """The sampled parameters of one publication, by the published names; `compare` tells whether an engine has them."""

    def __init__(self) -> None:
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
    ) -> tuple[list[str], set[str]]:
        """The server's parameters that differ from what was sent as `dtype`, and those that cannot be compared: which
        the engine does not tell, or whose layout or checksum the learner does not know."""
        every = {engine_name(name) for name in self._values}
        own = self._own(layout, dtype)
        if theirs is None or len(theirs) != len(own):
            return [], every
        known = {name for name in every if all(name in sums for sums in (*own, *theirs))}
        different = sorted(known)
        for cast in (dtype, *_DTYPES):  # the engine may hold what it was sent in a dtype of its own
            if different:
                own = self._own(layout, cast)
                pairs = list(zip(own, theirs, strict=True))
                different = [name for name in different if any(mine[name] != its[name] for mine, its in pairs)]
        return different, every - known

    # ------------------------------------------------------------------ what it is made of

    def _own(self, layout: Layout, dtype: torch.dtype) -> Sums:
        """Once for all engines of a layout; no rank's where the checksums are of a kind that is not known here."""
        if not layout.hashed or layout.num_ranks > 1:
            return ()
        if (layout, dtype) not in self._sums:
            self._sums[layout, dtype] = (self._hashed(layout, dtype),)
        return self._sums[layout, dtype]

    def _hashed(self, layout: Layout, dtype: torch.dtype) -> dict[str, str]:
        parts = ((name, values.to(dtype)) for name, values in self._laid_out(layout))
        if layout.hashed == "sha256":
            return checksums((name, part.cpu().flatten().view(torch.uint8).numpy().data) for name, part in parts)
        return {name: gpu_hash(values) for name, values in _joined(parts) if values.nbytes < MAX_BYTES}

    def _laid_out(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Those whose layout is known."""
        for name, values in self._values.items():
            if layout.hashed == "gpu" and EXPERTS in name:
                continue
            missing = -len(values) % VOCABULARY_UNIT
            if layout.fills_vocabulary and name.endswith(_VOCABULARIES) and missing:
                values = torch.nn.functional.pad(values, (0, 0, 0, missing))
            yield name, values


def _joined(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(the server's name, all that it holds under it) from Hugging Face names in the model's order."""
    parts: dict[str, list[Tensor]] = {}
    for name, values in weights:
        parts.setdefault(engine_name(name), []).append(values)
    return ((name, torch.cat(part) if len(part) > 1 else part[0]) for name, part in parts.items())
