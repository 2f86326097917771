"""What one rank of a context group has of a microbatch, known to the host of every rank before anything is computed.

Shape suffixes: T = tokens of the microbatch, L = those of this rank, N = sampled tokens of the microbatch, n = those
that this rank predicts, M = visual tokens, V = visual tokens of all distinct images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.distributed import Context
from learner.parallel.layout import Chunk, chunk, gathered_rows, least_tokens, places, spans

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Rows of the vision tower's output, from the rank that computed them to those whose tokens they are."""

    rows: Tensor  # int64, of this rank's output: what goes to rank 0, to rank 1, ...
    sent: tuple[int, ...]  # how many of these go to each rank
    received: tuple[int, ...]  # how many come from each rank


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A rank's tokens and predictions. A rank that predicts nothing has one stand-in, whose outputs nobody reads."""

    context: Context
    chunks: tuple[Chunk, ...]
    places: Tensor  # int64 [L], of its tokens among the T
    token_rows: Tensor  # int64 [T], of each token after a gathering that pads to `most_tokens`
    most_tokens: int
    own: Tensor  # int64 [max(n,1)], of its predictions among the N
    num_own: int  # n
    own_rows: Tensor  # int64 [N], of each prediction after a gathering that pads to `most_own`
    most_own: int
    exchange: Exchange | None  # None where no rank has an image


def filled(arrays: Arrays, lengths: tuple[int, ...], size: int) -> tuple[Arrays, tuple[int, ...]]:
    """A stream too short to leave every rank a token gets one more document, of which nothing is asked."""
    missing = least_tokens(size) - sum(lengths)
    if missing <= 0:
        return arrays, lengths
    ids, positions = arrays["input_ids"], arrays["position_ids"]
    longer = {
        "input_ids": np.concatenate([ids, np.repeat(ids[:, :1], missing, axis=1)], axis=1),
        "position_ids": np.concatenate([positions, np.zeros((4, 1, missing), np.int64)], axis=2),
    }
    return arrays | longer, (*lengths, missing)


def divide(
    arrays: Arrays, lengths: tuple[int, ...], visual_tokens: Sequence[int], context: Context
) -> tuple[Arrays, Share]:
    """A rank's part of a microbatch's arrays, and how it fits to those of the others; on the host.

    `arrays`: input_ids [1,T], position_ids [4,1,T], predictors [N] and visual_positions [M] among the T, visual_rows
    [M] among the V, where the images of rank 0 come first, then those of rank 1, ...; `visual_tokens`: how many of the
    V each rank computes. T leaves no rank without a token.
    """
    length, size, rank = sum(lengths), context.size, context.rank
    of_ranks = [places(length, size, r) for r in range(size)]
    mine = of_ranks[rank]
    holder, local = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    for r, held in enumerate(of_ranks):
        holder[held], local[held] = r, np.arange(len(held))
    predicted = [np.flatnonzero(holder[arrays["predictors"]] == r) for r in range(size)]
    num_own = len(predicted[rank])
    own = predicted[rank] if num_own else np.zeros(1, dtype=np.int64)
    at, rows = arrays["visual_positions"], arrays["visual_rows"]
    read_by = [np.unique(rows[holder[at] == r]) for r in range(size)]
    seen = holder[at] == rank
    part = {
        "input_ids": arrays["input_ids"][:, mine],
        "position_ids": arrays["position_ids"][:, :, mine],
        "predictors": local[arrays["predictors"][own]] if num_own else own,
        "asked_ids": arrays["target_ids"][own],
        "visual_positions": local[at[seen]],
        "visual_rows": np.searchsorted(read_by[rank], rows[seen]),
    }

    token_counts, own_counts = [len(held) for held in of_ranks], [len(found) for found in predicted]
    share = Share(
        context=context,
        chunks=tuple(chunk(lengths, start, stop) for start, stop in spans(length, size, rank)),
        places=_tensor(mine),
        token_rows=_tensor(gathered_rows(token_counts, of_ranks)),
        most_tokens=max(token_counts),
        own=_tensor(own),
        num_own=num_own,
        own_rows=_tensor(gathered_rows(own_counts, predicted)),
        most_own=max(own_counts),
        exchange=_exchange(read_by, visual_tokens, rank) if len(at) else None,
    )
    return arrays | part, share


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _exchange(read_by: list[np.ndarray], visual_tokens: Sequence[int], rank: int) -> Exchange:
    """`read_by`: ascending rows of the V that each rank reads."""
    bounds = np.cumsum([0, *visual_tokens])
    first, last = bounds[rank], bounds[rank + 1]
    sent = [rows[(rows >= first) & (rows < last)] - first for rows in read_by]
    received = np.diff(np.searchsorted(read_by[rank], bounds))
    return Exchange(_tensor(np.concatenate(sent)), tuple(map(len, sent)), tuple(received.tolist()))
