"""What the ranks of a context group exchange in a forward, and its gradients in the backward.

Shape suffixes: T, L, N and n as in learner/parallel/share.py; A = heads, D = head size, W = values of one row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.parallel.share import Exchange, Share

# Their names in torch 2.13, or those that it had before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def whole_keys_values(key: Tensor, value: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """This rank's [1,A,L,D] each -> the microbatch's [1,A,T,D] each, by one gathering. Their gradients are summed over
    the ranks, each of which gets those of its tokens."""
    heads = key.shape[1]
    both_LW = torch.cat((key, value), 1).squeeze(0).transpose(0, 1).flatten(1)
    both = _Tokens.apply(both_LW, share).unflatten(1, (2 * heads, -1)).transpose(0, 1)[None]
    return both[:, :heads], both[:, heads:]


def whole_columns(columns: list[Tensor], share: Share) -> list[Tensor]:
    """Of this rank's predictions, [max(n,1)] each -> of all, [N] each, on every rank; one dtype.

    All ranks compute the same from them, and each takes the gradients of its own predictions: nothing travels back.
    """
    return list(_Predictions.apply(share, *columns))


def lowest(column_N: Tensor, share: Share | None) -> Tensor:
    """Of a column [N] that each rank has, the least of all ranks' values; no gradient."""
    if share is None:
        return column_N
    found = column_N.clone()
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=share.context.group)
    return found


def exchanged(rows: Tensor, exchange: Exchange, share: Share) -> Tensor:
    """Rows [V of this rank, W] of the vision tower's output -> those that this rank reads, in their order. Where it
    has computed none, `rows` are a blank image's, and get gradients of 0."""
    return _Rows.apply(rows.index_select(0, exchange.rows), exchange, share)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LW: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return _gathered(x_LW, share.most_tokens, share).index_select(0, share.token_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> Any:
        share: Share = ctx.share
        padded = grad_TW.new_zeros(share.context.size * share.most_tokens, grad_TW.shape[1])
        padded.index_copy_(0, share.token_rows, grad_TW)
        summed = grad_TW.new_empty(share.most_tokens, grad_TW.shape[1])
        reduce_scatter(summed, padded, group=share.context.group)
        return summed[: len(share.places)], None


class _Predictions(torch.autograd.Function):
    """Its outputs are no views: FSDP puts hooks on what a policy returns."""

    @staticmethod
    def forward(ctx: Any, share: Share, *columns: Tensor) -> tuple[Tensor, ...]:
        ctx.share = share
        x_nW = torch.stack(columns, 1)[: share.num_own]
        whole_NW = _gathered(x_nW, share.most_own, share).index_select(0, share.own_rows)
        return tuple(column.clone() for column in whole_NW.unbind(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        share: Share = ctx.share
        own = [grad.index_select(0, share.own) for grad in grads]
        return None, *(own if share.num_own else map(torch.zeros_like, own))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SW: Tensor, exchange: Exchange, share: Share) -> Tensor:
        ctx.exchange, ctx.share = exchange, share
        return _all_to_all(x_SW, exchange.sent, exchange.received, share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RW: Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        return _all_to_all(grad_RW, exchange.received, exchange.sent, ctx.share), None, None


def _gathered(x: Tensor, most: int, share: Share) -> Tensor:
    """[own, W] of every rank, each padded to `most` rows: [C*most, W]."""
    padded = x.new_zeros(most, x.shape[1])
    padded[: len(x)] = x
    gathered = x.new_empty(share.context.size * most, x.shape[1])
    all_gather(gathered, padded, group=share.context.group)
    return gathered


def _all_to_all(x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], share: Share) -> Tensor:
    result = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=share.context.group)
    return result
