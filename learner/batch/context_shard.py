"""The part of a microbatch that one rank of a context group has. The host of every rank knows it before any
computation.

Shape suffixes: T = tokens of the microbatch, L = tokens of this rank, N = sampled tokens of the microbatch, n = those
that this rank predicts, M = visual tokens, V = visual tokens of all distinct images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.batch.zigzag import Chunk, chunk, gathered_rows, least_tokens, spans, token_positions
from learner.distributed import Context

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """The exchange of rows of the vision tower's output, from the rank that computes a row to the ranks whose tokens
    read it."""

    rows: Tensor  # int64, rows of this rank's output in the order of their receivers: for rank 0, for rank 1, ...
    sent: tuple[int, ...]  # number of rows for each rank
    received: tuple[int, ...]  # number of rows from each rank


@dataclass(frozen=True, slots=True, eq=False)
class ContextShard:
    """A rank's tokens and predictions. A rank without predictions has one stand-in prediction, whose outputs are not
    used."""

    context: Context
    chunks: tuple[Chunk, ...]
    positions: Tensor  # int64 [L], positions of its tokens among the T
    token_rows: Tensor  # int64 [T], row of each token after a gathering that pads to `most_tokens`
    most_tokens: int
    predictions: Tensor  # int64 [max(n,1)], its predictions among the N
    num_predictions: int  # n
    prediction_rows: Tensor  # int64 [N], row of each prediction after a gathering that pads to `most_predictions`
    most_predictions: int
    exchange: Exchange | None  # None if no rank has an image


def filled(arrays: Arrays, lengths: tuple[int, ...], size: int) -> tuple[Arrays, tuple[int, ...]]:
    """Return a stream with at least one token for every chunk. A stream that is too short is extended by one document
    whose tokens predict nothing."""
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
) -> tuple[Arrays, ContextShard]:
    """Return a rank's part of a microbatch's arrays, and its shard, on the host.

    `arrays`: input_ids [1,T], position_ids [4,1,T], predictors [N] and visual_positions [M] among the T, visual_rows
    [M] among the V, in which the images of rank 0 come first, then those of rank 1, ... `visual_tokens`: number of the
    V that each rank computes. T must be large enough for every rank to have tokens.
    """
    length, size, rank = sum(lengths), context.size, context.rank
    of_ranks = [token_positions(length, size, r) for r in range(size)]
    own_positions = of_ranks[rank]
    holder, local = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    for r, held in enumerate(of_ranks):
        holder[held], local[held] = r, np.arange(len(held))
    predicted = [np.flatnonzero(holder[arrays["predictors"]] == r) for r in range(size)]
    num_predictions = len(predicted[rank])
    own = predicted[rank] if num_predictions else np.zeros(1, dtype=np.int64)
    at, rows = arrays["visual_positions"], arrays["visual_rows"]
    read_by = [np.unique(rows[holder[at] == r]) for r in range(size)]
    is_own = holder[at] == rank
    part = {
        "input_ids": arrays["input_ids"][:, own_positions],
        "position_ids": arrays["position_ids"][:, :, own_positions],
        "predictors": local[arrays["predictors"][own]] if num_predictions else own,
        "asked_ids": arrays["target_ids"][own],
        "visual_positions": local[at[is_own]],
        "visual_rows": np.searchsorted(read_by[rank], rows[is_own]),
    }

    token_counts, own_counts = [len(held) for held in of_ranks], [len(items) for items in predicted]
    shard = ContextShard(
        context=context,
        chunks=tuple(chunk(lengths, start, stop) for start, stop in spans(length, size, rank)),
        positions=_tensor(own_positions),
        token_rows=_tensor(gathered_rows(token_counts, of_ranks)),
        most_tokens=max(token_counts),
        predictions=_tensor(own),
        num_predictions=num_predictions,
        prediction_rows=_tensor(gathered_rows(own_counts, predicted)),
        most_predictions=max(own_counts),
        exchange=_exchange(read_by, visual_tokens, rank) if len(at) else None,
    )
    return arrays | part, shard


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _exchange(read_by: list[np.ndarray], visual_tokens: Sequence[int], rank: int) -> Exchange:
    """Return the exchange of rows. `read_by`: for each rank the ascending rows of the V that it reads."""
    bounds = np.cumsum([0, *visual_tokens])
    first, last = bounds[rank], bounds[rank + 1]
    sent = [rows[(rows >= first) & (rows < last)] - first for rows in read_by]
    received = np.diff(np.searchsorted(read_by[rank], bounds))
    return Exchange(_tensor(np.concatenate(sent)), tuple(map(len, sent)), tuple(received.tolist()))
