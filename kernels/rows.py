"""Row-wise parts of the fused log-probability over one tile of logits: softmax statistics and the logits' gradient.

Suffixes: R rows of the tile, C vocabulary columns. A logit of -inf is a banned token: probability 0, gradient 0.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from kernels.row_records import RowGrads, RowStats

BLOCK_ELEMENTS = 1 << 18  # the element-wise passes of the CPU stay within its second-level cache
EXP_IS_ZERO = -1.0e4  # exp of this is 0 in float32


def use_triton(tensor: Tensor) -> bool:
    """Triton runs the rows on a GPU, and on the CPU where Triton's interpreter is switched on."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def fold(
    tile_RC: Tensor, first_column: int, stats: RowStats, target_R: Tensor, temperature: float, banned: bool
) -> None:
    """Fold one tile into the running statistics; `banned` says that the tile holds -inf."""
    if use_triton(tile_RC):
        from kernels import rows_triton

        rows_triton.fold(tile_RC, first_column, stats, target_R, temperature)
        return
    step = max(1, BLOCK_ELEMENTS // tile_RC.shape[1])
    for start in range(0, tile_RC.shape[0], step):
        rows = slice(start, start + step)
        _fold_block(tile_RC[rows], first_column, stats.rows(rows), target_R[rows], temperature, banned)


def _fold_block(
    x: Tensor, first_column: int, stats: RowStats, target: Tensor, temperature: float, banned: bool
) -> None:
    largest = torch.maximum(stats.largest, x.amax(1))
    z = x - largest[:, None]
    shift = stats.largest - largest
    if temperature != 1.0:
        z.div_(temperature)
        shift.div_(temperature)
    shift.clamp_(min=EXP_IS_ZERO)
    if banned:
        z.clamp_(min=EXP_IS_ZERO)
    e = z.exp()
    scale = shift.exp()
    stats.sum_exp_z.add_(stats.sum_exp * shift).mul_(scale).add_(z.mul_(e).sum(1))
    stats.sum_exp.mul_(scale).add_(e.sum(1))
    stats.largest.copy_(largest)
    column = target - first_column
    inside = (column >= 0) & (column < x.shape[1])
    picked = x.gather(1, column.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    stats.target_logit.copy_(torch.where(inside, picked, stats.target_logit))


def grad_in_place(
    tile_RC: Tensor,
    first_column: int,
    grads: RowGrads,
    target_R: Tensor,
    temperature: float,
    banned: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Overwrite a tile of logits by its gradient, and return it: as `dtype` on a GPU, in float32 on a CPU."""
    if use_triton(tile_RC):
        from kernels import rows_triton

        return rows_triton.grad_in_place(tile_RC, first_column, grads, target_R, temperature, dtype)
    step = max(1, BLOCK_ELEMENTS // tile_RC.shape[1])
    for start in range(0, tile_RC.shape[0], step):
        rows = slice(start, start + step)
        _grad_block(tile_RC[rows], first_column, grads.rows(rows), target_R[rows], temperature, banned)
    return tile_RC


def _grad_block(
    x: Tensor, first_column: int, grads: RowGrads, target: Tensor, temperature: float, banned: bool
) -> None:
    z = x - grads.largest[:, None]
    g, h = grads.grad_logprob, grads.grad_entropy
    if temperature != 1.0:
        z.div_(temperature)
        g = g / temperature
        h = None if h is None else h / temperature
    log_sum = grads.log_sum.float()
    unrounded = (log_sum.double() - grads.log_sum).exp().float()  # what the rounding of log_sum did to each p
    z.sub_(log_sum[:, None])
    if banned:
        z.clamp_(min=EXP_IS_ZERO)
    if h is None:
        d = z.exp_().mul_((-g * unrounded)[:, None])
    else:
        p = z.exp().mul_(unrounded[:, None])
        offset = -(g + h * grads.entropy)
        d = torch.addcmul(offset[:, None], z, h[:, None], value=-1).mul_(p)
    column = target - first_column
    inside = (column >= 0) & (column < x.shape[1])
    d.scatter_add_(1, column.clamp(0, x.shape[1] - 1)[:, None], (g * inside)[:, None])
    x.copy_(d)
