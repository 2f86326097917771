"""Tokens that a group's episodes begin with alike are computed once in a microbatch: the prompt and its images, and
what was sampled alike.

Of a group's episodes the first is computed whole, each other from the token on in which it differs from the earlier
one that is like it for longest. Only attention reads more: there the other's keys and values are copied to where its
own would lie, so that any kernel that takes fewer queries than keys serves.

Shape suffixes: C = what is compared of a token, T = tokens of the documents, U = those that are computed, K = key
heads, D = head size.
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

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """Which tokens are computed, and where the others' keys and values are taken from. Each document has one that is
    computed."""

    places: Tensor  # int64 [U], of the computed tokens among the T, ascending
    rows: Tensor  # int64 [T], of each token's key and value among the U
    copies: tuple[tuple[int, int, int], ...]  # (first place among the T, first row among the U, how many)
    cu_queries: Tensor  # int32 [documents+1], where the documents' computed tokens begin and end among the U
    most_queries: int  # of a document
    saved_pairs: int  # of a query and a key that a causal attention of all T would read besides


def find_prefixes(arrays: Arrays, lengths: Sequence[int], groups: Sequence[int]) -> Prefixes | None:
    """`arrays` as of `computed_part`; of each document its length and its group. None where no two documents of a group
    begin alike."""
    tokens_CT = _told(arrays)
    bounds = np.cumsum([0, *lengths])
    computed, source = np.ones(bounds[-1], dtype=bool), np.arange(bounds[-1])
    earlier: dict[int, list[int]] = {}  # where documents of a group begin
    found = []
    for (start, stop), group in zip(pairwise(bounds.tolist()), groups, strict=True):
        others = earlier.setdefault(group, [])
        alike = [(_alike(tokens_CT, other, start, stop - start - 1), other) for other in others]
        count, other = max(alike, key=itemgetter(0), default=(0, 0))
        if count:
            found.append((start, count))
            computed[start : start + count] = False
            source[start : start + count] = source[other : other + count]
        others.append(start)
    if not found:
        return None
    places, rows = np.flatnonzero(computed), (np.cumsum(computed) - 1)[source]
    borders = np.searchsorted(places, bounds)
    return Prefixes(
        places=torch.from_numpy(places),
        rows=torch.from_numpy(rows),
        copies=tuple(copy for start, count in found for copy in _pieces(rows[start : start + count], start)),
        cu_queries=torch.from_numpy(borders.astype(np.int32)),
        most_queries=int(np.diff(borders).max()),
        saved_pairs=sum(count * (count + 1) // 2 for _, count in found),
    )


def _alike(tokens_CT: np.ndarray, one: int, other: int, most: int) -> int:
    """How many tokens from `one` and from `other` on are the same, `most` at most. No more than `one`'s document has:
    their places in the document differ beyond it."""
    differ = (tokens_CT[:, one : one + most] != tokens_CT[:, other : other + most]).any(0)
    return int(differ.argmax()) if differ.any() else most


def _pieces(rows: np.ndarray, place: int) -> Iterator[tuple[int, int, int]]:
    """Neighbours that are copies of neighbours, the first of them at `place`; as in `copies`."""
    ends = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return ((place + start, int(rows[start]), stop - start) for start, stop in pairwise(ends))


def _told(arrays: Arrays) -> np.ndarray:
    """All that the model is told of each token: its id, its row of the tower's output, its positions; int64 [6,T]."""
    ids = arrays["input_ids"]
    visual = np.full_like(ids, -1)
    visual[0, arrays["visual_positions"]] = arrays["visual_rows"]
    return np.concatenate([ids, visual, arrays["position_ids"][:, 0]])


def computed_part(arrays: Arrays, prefixes: Prefixes) -> Arrays:
    """What is left of a microbatch's arrays that lie along the T or name places there: input_ids [1,T], position_ids
    [4,1,T], of which the first is the place in the document, predictors [N], which may be the same for several
    documents, visual_positions and visual_rows [M]."""
    places, rows = prefixes.places.numpy(), prefixes.rows.numpy()
    at = arrays["visual_positions"]
    stays = np.isin(at, places)
    return {
        "input_ids": arrays["input_ids"][:, places],
        "position_ids": arrays["position_ids"][:, :, places],
        "predictors": rows[arrays["predictors"]],
        "visual_positions": rows[at[stays]],
        "visual_rows": arrays["visual_rows"][stays],
    }


def with_prefixes(x_1KUD: Tensor, prefixes: Prefixes) -> Tensor:
    """Keys or values of the computed tokens -> those of all: [1,K,T,D]."""
    x_UKD = x_1KUD.squeeze(0).transpose(0, 1)
    x_TKD: Tensor = _Copied.apply(x_UKD, prefixes)
    return x_TKD.transpose(0, 1).unsqueeze(0)


class _Copied(torch.autograd.Function):
    """A token's gradient is the sum over its copies: in float32, and always in the same order."""

    @staticmethod
    def forward(ctx: Any, x_UKD: Tensor, prefixes: Prefixes) -> Tensor:
        ctx.prefixes = prefixes
        return x_UKD.index_select(0, prefixes.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TKD: Tensor) -> tuple[Tensor, None]:
        prefixes: Prefixes = ctx.prefixes
        of_computed = grad_TKD.index_select(0, prefixes.places)
        total = of_computed.to(torch.promote_types(of_computed.dtype, torch.float32))
        for place, row, count in prefixes.copies:
            total[row : row + count] += grad_TKD[place : place + count]
        return total.to(grad_TKD.dtype), None
