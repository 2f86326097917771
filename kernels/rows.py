"""Row-wise parts of the fused log-probability for one tile of logits: softmax statistics and the logits' gradient.

Suffixes: R rows of the tile, C vocabulary columns. A logit of -inf is a banned token: probability 0, gradient 0.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from kernels.row_records import RowGrads, RowStats, Tile

BLOCK_ELEMENTS = 1 << 18  # block size with which the CPU's element-wise passes stay within its second-level cache
EXP_IS_ZERO = -1.0e4  # exp of this is 0 in float32


def use_triton(tensor: Tensor) -> bool:
    """Tell whether Triton computes the rows: on a GPU, or on the CPU if Triton's interpreter is switched on."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def fold(
    tile: Tile, first_column: int, stats: RowStats, target_R: Tensor, temperature: float, kept: Tile | None = None
) -> None:
    """Fold one tile of logits into the running statistics; write the exponentials of its logits to `kept`, if given."""
    if use_triton(tile.values):
        from kernels import rows_triton

        rows_triton.fold(tile, first_column, stats, target_R, temperature, kept)
        return
    assert kept is None, "a CPU keeps logits"
    step = max(1, BLOCK_ELEMENTS // tile.values.shape[1])
    for start in range(0, tile.values.shape[0], step):
        rows = slice(start, start + step)
        _fold_block(tile.values[rows], first_column, stats.rows(rows), target_R[rows], temperature, tile.banned)


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
    column, inside = _columns_of(target, first_column, x)
    stats.target_logit.copy_(torch.where(inside, x.gather(1, column)[:, 0], stats.target_logit))


def _columns_of(target: Tensor, first_column: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (column of each row's target in the tile x, clamped, [R, 1]; whether the target is in the tile, [R])."""
    column = target - first_column
    return column.clamp(0, x.shape[1] - 1)[:, None], (column >= 0) & (column < x.shape[1])


def write_grad(
    tile: Tile,
    first_column: int,
    grads: RowGrads,
    target_R: Tensor,
    temperature: float,
    out_RC: Tensor,
    source_R: Tensor | None = None,
) -> None:
    """Write the gradient of a tile's logits to `out`. `out` may be the tile itself if their dtypes have the same size.

    source: int64 indices of the tile's rows, if only some are wanted; all other row-wise arguments have these rows
    only, and `out` must not be the tile. On a CPU `out` is float32.
    """
    if use_triton(tile.values):
        from kernels import rows_triton

        rows_triton.write_grad(tile, first_column, grads, target_R, temperature, out_RC, source_R)
        return
    assert tile.largest is None, "a CPU keeps logits"
    if source_R is not None:
        torch.index_select(tile.values, 0, source_R, out=out_RC)
    x_RC = tile.values if source_R is None else out_RC
    step = max(1, BLOCK_ELEMENTS // out_RC.shape[1])
    for start in range(0, out_RC.shape[0], step):
        rows = slice(start, start + step)
        out_RC[rows] = _grad_block(x_RC[rows], first_column, grads.rows(rows), target_R[rows], temperature, tile.banned)


def _grad_block(
    x: Tensor, first_column: int, grads: RowGrads, target: Tensor, temperature: float, banned: bool
) -> Tensor:
    z = x - grads.largest[:, None]
    if temperature != 1.0:
        z.div_(temperature)
    if banned:
        z.clamp_(min=EXP_IS_ZERO)
    if grads.entropy_slope is None:
        d = z.exp_().mul_(grads.slope[:, None])
    else:
        e = z.exp()
        d = torch.addcmul(grads.slope[:, None], z, grads.entropy_slope[:, None], value=-1).mul_(e)
    column, inside = _columns_of(target, first_column, x)
    return d.scatter_(1, column, torch.where(inside, grads.at_target, d.gather(1, column)[:, 0])[:, None])
