"""Row-wise parts of the fused log-probability over one tile of logits: softmax statistics and the logits' gradient.

Suffixes: R rows of the tile, C vocabulary columns. A logit of -inf is a banned token: probability 0, gradient 0.
The statistics are relative to the running maximum, so that logits of any size cost no precision.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18  # the element-wise passes of the CPU stay within its second-level cache
FLOOR = -3.0e38  # below every logit, and finite: (FLOOR - FLOOR) is 0 and not NaN
EXP_IS_ZERO = -1.0e4  # exp of this is 0 in float32


@dataclass(frozen=True, slots=True)
class RowStats:
    """Running softmax statistics per row, float32 [R]; `z = (logit - largest) / temperature`."""

    largest: Tensor
    sum_exp: Tensor  # sum of exp(z)
    sum_exp_z: Tensor  # sum of exp(z) * z
    target_logit: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> RowStats:
        zeros = torch.zeros((3, num_rows), device=device)
        return cls(torch.full((num_rows,), FLOOR, device=device), zeros[0], zeros[1], zeros[2])

    def rows(self, rows: slice) -> RowStats:
        """A view of some rows: folding into it folds into this."""
        return RowStats(self.largest[rows], self.sum_exp[rows], self.sum_exp_z[rows], self.target_logit[rows])

    def finish(self, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(logprob of the target, entropy, log of sum_exp), each [R]; the last in float64, since its rounding would
        move all of a row's gradient one way."""
        log_sum = self.sum_exp.double().log()
        gap = self.target_logit - self.largest
        logprob = (gap if temperature is None else gap / temperature) - log_sum
        return logprob.float(), (log_sum - self.sum_exp_z / self.sum_exp).clamp_(min=0).float(), log_sum


@dataclass(frozen=True, slots=True)
class RowGrads:
    """What a row needs to write its logits' gradient, float32 [R] each, `log_sum` float64."""

    largest: Tensor
    log_sum: Tensor
    entropy: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor | None

    def rows(self, rows: slice) -> RowGrads:
        """A view of some rows."""
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy[rows]
        return RowGrads(
            self.largest[rows], self.log_sum[rows], self.entropy[rows], self.grad_logprob[rows], grad_entropy
        )


def use_triton(tensor: Tensor) -> bool:
    """Triton runs the rows on a GPU, and on the CPU where Triton's interpreter is switched on."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def fold(
    tile_RC: Tensor, first_column: int, stats: RowStats, target_R: Tensor, temperature_R: Tensor | None, banned: bool
) -> None:
    """Fold one tile into the running statistics; `banned` says that the tile holds -inf."""
    if use_triton(tile_RC):
        from kernels import rows_triton

        rows_triton.fold(tile_RC, first_column, stats, target_R, temperature_R)
        return
    step = max(1, BLOCK_ELEMENTS // tile_RC.shape[1])
    for start in range(0, tile_RC.shape[0], step):
        rows = slice(start, start + step)
        temperature = None if temperature_R is None else temperature_R[rows]
        _fold_block(tile_RC[rows], first_column, stats.rows(rows), target_R[rows], temperature, banned)


def _fold_block(
    x: Tensor, first_column: int, stats: RowStats, target: Tensor, temperature: Tensor | None, banned: bool
) -> None:
    x = x.float()
    largest = torch.maximum(stats.largest, x.amax(1))
    z = x - largest[:, None]
    shift = stats.largest - largest
    if temperature is not None:
        z.div_(temperature[:, None])
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
    temperature_R: Tensor | None,
    banned: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Overwrite a tile of logits by its gradient, and return it as `dtype`; the memory is the tile's own."""
    if use_triton(tile_RC):
        from kernels import rows_triton

        return rows_triton.grad_in_place(tile_RC, first_column, grads, target_R, temperature_R, dtype)
    step = max(1, BLOCK_ELEMENTS // tile_RC.shape[1])
    for start in range(0, tile_RC.shape[0], step):
        rows = slice(start, start + step)
        temperature = None if temperature_R is None else temperature_R[rows]
        _grad_block(tile_RC[rows], first_column, grads.rows(rows), target_R[rows], temperature, banned)
    return tile_RC.to(dtype)


def _grad_block(
    x: Tensor, first_column: int, grads: RowGrads, target: Tensor, temperature: Tensor | None, banned: bool
) -> None:
    z = x.float() - grads.largest[:, None]
    g, h = grads.grad_logprob, grads.grad_entropy
    if temperature is not None:
        z.div_(temperature[:, None])
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
