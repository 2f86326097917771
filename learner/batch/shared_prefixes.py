"""Shared prefixes: equal first tokens of a group's episodes are computed once in a microbatch. They are the prompt and
its images, and sampled tokens that are equal.

A group's first episode is computed whole; each other one from its first token that differs from the earlier episode
with the longest common prefix. Attention reads the prefix: the earlier episode's keys and values are copied to the
positions where the episode's own would be, so that any kernel can be used that supports fewer queries than keys. A
recurrence goes on from the earlier episode's state at the end of the prefix.

Shape suffixes: C = inputs that are compared for each token, T = tokens of the documents, U = tokens that are computed,
K = key heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.delta_rule import Piece

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """The tokens that are computed, and the sources of the other tokens' keys and values. Each document has at least
    one computed token."""

    positions: Tensor  # int64 [U], positions of the computed tokens among the T, ascending
    rows: Tensor  # int64 [T], row of each token's key and value among the U
    copies: tuple[tuple[int, int, int], ...]  # (first position among the T, first row among the U, number of tokens)
    cu_queries: Tensor  # int32 [documents+1], borders of the documents' computed tokens among the U
    most_queries: int  # largest number of a document's computed tokens
    saved_pairs: int  # pairs of query and key that are saved, compared with causal attention of all T


def find_prefixes(arrays: Arrays, lengths: Sequence[int], groups: Sequence[int]) -> Prefixes | None:
    """Return the prefixes that several documents share; None if no two documents of a group have a common prefix.

    `arrays`: as for `computed_part`; `lengths` and `groups`: one for each document.
    """
    tokens_CT = _token_inputs(arrays)
    bounds = np.cumsum([0, *lengths])
    computed, source = np.ones(bounds[-1], dtype=bool), np.arange(bounds[-1])
    earlier: dict[int, list[int]] = {}  # group -> first positions of its documents so far
    shared = []
    for (start, stop), group in zip(pairwise(bounds.tolist()), groups, strict=True):
        others = earlier.setdefault(group, [])
        alike = [(_alike(tokens_CT, other, start, stop - start - 1), other) for other in others]
        count, other = max(alike, key=itemgetter(0), default=(0, 0))
        if count:
            shared.append((start, count))
            computed[start : start + count] = False
            source[start : start + count] = source[other : other + count]
        others.append(start)
    if not shared:
        return None
    positions, rows = np.flatnonzero(computed), (np.cumsum(computed) - 1)[source]
    borders = np.searchsorted(positions, bounds)
    return Prefixes(
        positions=torch.from_numpy(positions),
        rows=torch.from_numpy(rows),
        copies=tuple(copy for start, count in shared for copy in _pieces(rows[start : start + count], start)),
        cu_queries=torch.from_numpy(borders.astype(np.int32)),
        most_queries=int(np.diff(borders).max()),
        saved_pairs=sum(count * (count + 1) // 2 for _, count in shared),
    )


def _alike(tokens_CT: np.ndarray, one: int, other: int, most: int) -> int:
    """Return the number of equal tokens from `one` and from `other` on, at most `most`.

    It cannot exceed the length of the document at `one`: beyond it the positions within the documents differ.
    """
    differ = (tokens_CT[:, one : one + most] != tokens_CT[:, other : other + most]).any(0)
    return int(differ.argmax()) if differ.any() else most


def _pieces(rows: np.ndarray, position: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of tokens whose sources are neighbours too, the first token at `position`, in the form of `copies`."""
    ends = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return ((position + start, int(rows[start]), stop - start) for start, stop in pairwise(ends))


def _token_inputs(arrays: Arrays) -> np.ndarray:
    """Return all of the model's inputs for each token: its id, its row of the tower's output, its positions; int64
    [6,T]."""
    ids = arrays["input_ids"]
    visual = np.full_like(ids, -1)
    visual[0, arrays["visual_positions"]] = arrays["visual_rows"]
    return np.concatenate([ids, visual, arrays["position_ids"][:, 0]])


def computed_part(arrays: Arrays, prefixes: Prefixes) -> Arrays:
    """Return those of a microbatch's arrays that change if only some tokens are computed.

    These are input_ids [1,T], position_ids [4,1,T] (the first row is the position in the document), predictors [N]
    (which may be equal for several documents), visual_positions and visual_rows [M].
    """
    positions, rows = prefixes.positions.numpy(), prefixes.rows.numpy()
    at = arrays["visual_positions"]
    stays = np.isin(at, positions)
    return {
        "input_ids": arrays["input_ids"][:, positions],
        "position_ids": arrays["position_ids"][:, :, positions],
        "predictors": rows[arrays["predictors"]],
        "visual_positions": rows[at[stays]],
        "visual_rows": arrays["visual_rows"][stays],
    }


def pieces_of(lengths: Sequence[int], prefixes: Prefixes | None) -> list[Piece]:
    """Return the pieces of a recurrence over documents of these lengths: the computed tokens of each, cut where another
    one goes on from."""
    if prefixes is None:
        starts = np.cumsum([0, *lengths]).tolist()
        return [Piece(start, length) for start, length in zip(starts, lengths, strict=False)]
    positions, rows = prefixes.positions.numpy(), prefixes.rows.numpy()
    begins = np.cumsum([0, *lengths])[:-1]
    firsts, ends = prefixes.cu_queries[:-1].tolist(), prefixes.cu_queries[1:].tolist()
    # The row of the token before each document's first computed one; -1 = there is none.
    before = [
        int(rows[positions[first] - 1]) if positions[first] > begin else -1
        for first, begin in zip(firsts, begins.tolist(), strict=True)
    ]
    cuts = {row + 1 for row in before if row >= 0}
    pieces: list[Piece] = []
    ending: dict[int, int] = {}  # the piece that ends at a row
    for first, end, row in zip(firsts, ends, before, strict=True):
        borders = sorted({first, end, *(cut for cut in cuts if first < cut < end)})
        parent = ending[row] if row >= 0 else -1
        for start, stop in pairwise(borders):
            pieces.append(Piece(start, stop - start, parent))
            parent = ending[stop - 1] = len(pieces) - 1
    return pieces


def with_prefixes(x_1KUD: Tensor, prefixes: Prefixes) -> Tensor:
    """Return keys or values of all tokens, [1,K,T,D], from those of the computed tokens."""
    x_UKD = x_1KUD.squeeze(0).transpose(0, 1)
    x_TKD: Tensor = _Copied.apply(x_UKD, prefixes)
    return x_TKD.transpose(0, 1).unsqueeze(0)


class _Copied(torch.autograd.Function):
    """Copies rows. A row's gradient is the sum over its copies, in float32 and always in the same order."""

    @staticmethod
    def forward(ctx: Any, x_UKD: Tensor, prefixes: Prefixes) -> Tensor:
        ctx.prefixes = prefixes
        return x_UKD.index_select(0, prefixes.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TKD: Tensor) -> tuple[Tensor, None]:
        prefixes: Prefixes = ctx.prefixes
        of_computed = grad_TKD.index_select(0, prefixes.positions)
        total = of_computed.to(torch.promote_types(of_computed.dtype, torch.float32))
        for position, row, count in prefixes.copies:
            total[row : row + count] += grad_TKD[position : position + count]
        return total.to(grad_TKD.dtype), None
