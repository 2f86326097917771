"""The exchanges between ranks of a context group in a forward, and those of their gradients in the backward.

Shape suffixes: T, L, N and n as in learner/batch/context_shard.py; A = heads, D = head size, W = values of one row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.batch.context_shard import ContextShard, Exchange

# Functions that torch 2.13 renamed, under their new or old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def whole_keys_values(key: Tensor, value: Tensor, shard: ContextShard) -> tuple[Tensor, Tensor]:
    """Gather the ranks' keys and values, [1,A,L,D] each, into the microbatch's, [1,A,T,D] each, by one collective.

    Their gradients are summed over the ranks; each rank gets the sums for its own tokens.
    """
    heads = key.shape[1]
    both_LW = torch.cat((key, value), 1).squeeze(0).transpose(0, 1).flatten(1)
    both = _GatherTokens.apply(both_LW, shard).unflatten(1, (2 * heads, -1)).transpose(0, 1)[None]
    return both[:, :heads], both[:, heads:]


def whole_columns(columns: list[Tensor], shard: ContextShard) -> list[Tensor]:
    """Gather columns of this rank's predictions, [max(n,1)] each and of one dtype, into those of all predictions, [N]
    each, on every rank.

    All ranks compute the same from the results, and each takes the gradients of its own predictions, so the backward
    needs no exchange.
    """
    return list(_GatherPredictions.apply(shard, *columns))


def lowest(column_N: Tensor, shard: ContextShard | None) -> Tensor:
    """Return the elementwise minimum over ranks of a column [N] that each rank has; no gradient."""
    if shard is None:
        return column_N
    result = column_N.clone()
    dist.all_reduce(result, op=dist.ReduceOp.MIN, group=shard.context.group)
    return result


def exchanged(rows: Tensor, exchange: Exchange, shard: ContextShard) -> Tensor:
    """Exchange rows [V of this rank, W] of the vision tower's output for the rows that this rank reads, in their order.

    On a rank that has no image of its own, `rows` are those of a blank image; their gradients are 0.
    """
    return _ExchangeFeatures.apply(rows.index_select(0, exchange.rows), exchange, shard)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LW: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        return _all_gather_rows(x_LW, shard.most_tokens, shard).index_select(0, shard.token_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> Any:
        shard: ContextShard = ctx.shard
        padded = grad_TW.new_zeros(shard.context.size * shard.most_tokens, grad_TW.shape[1])
        padded.index_copy_(0, shard.token_rows, grad_TW)
        summed = grad_TW.new_empty(shard.most_tokens, grad_TW.shape[1])
        reduce_scatter(summed, padded, group=shard.context.group)
        return summed[: len(shard.positions)], None


class _GatherPredictions(torch.autograd.Function):
    """Gathers columns of predictions. Its outputs are copies, not views: FSDP puts hooks on a policy's outputs."""

    @staticmethod
    def forward(ctx: Any, shard: ContextShard, *columns: Tensor) -> tuple[Tensor, ...]:
        ctx.shard = shard
        x_nW = torch.stack(columns, 1)[: shard.num_predictions]
        whole_NW = _all_gather_rows(x_nW, shard.most_predictions, shard).index_select(0, shard.prediction_rows)
        return tuple(column.clone() for column in whole_NW.unbind(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shard: ContextShard = ctx.shard
        own = [grad.index_select(0, shard.predictions) for grad in grads]
        return None, *(own if shard.num_predictions else map(torch.zeros_like, own))


class _ExchangeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SW: Tensor, exchange: Exchange, shard: ContextShard) -> Tensor:
        ctx.exchange, ctx.shard = exchange, shard
        return _all_to_all(x_SW, exchange.sent, exchange.received, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RW: Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        return _all_to_all(grad_RW, exchange.received, exchange.sent, ctx.shard), None, None


def _all_gather_rows(x: Tensor, most: int, shard: ContextShard) -> Tensor:
    """Gather the rows [own, W] of every rank, each padded to `most` rows: [C*most, W]."""
    padded = x.new_zeros(most, x.shape[1])
    padded[: len(x)] = x
    gathered = x.new_empty(shard.context.size * most, x.shape[1])
    all_gather(gathered, padded, group=shard.context.group)
    return gathered


def _all_to_all(x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], shard: ContextShard) -> Tensor:
    result = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=shard.context.group)
    return result
