"""Log-probability of the sampled token and entropy, straight from hidden states: logits exist one tile at a time.

The vocabulary is walked in slices and the rows in chunks. The forward folds every tile of logits into softmax
statistics per row; the backward overwrites the same tiles by their gradients and multiplies them out: tiles that the
byte budget kept are used again, the others are computed again. A slice of the weight's gradient is summed in float32
over all rows before it is written, so it needs no float32 buffer of the weight's size.

Suffixes: N rows (tokens), H hidden size, V vocabulary, R rows of one chunk, C columns of one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import gemm, rows
from kernels.checks import check_shapes, check_values
from kernels.row_records import RowGrads, RowStats
from kernels.tiles import Tiling, plan


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    budget_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprob_N, entropy_N) of softmax(hidden @ weight.T / temperature), float32, without the [N, V] logits.

    hidden [N, H] and weight [V, H] share a device and a dtype: float32, bfloat16 or float16. Gradients reach both;
    logits are float32. target [N]: int64 or int32, the sampled tokens. banned_ids: tokens of probability 0.
    budget_bytes bounds the logits that exist at a time, kept ones included (64 MiB on a CPU, a tenth of the memory of
    a GPU). Beyond it and the two gradients: 4 R H bytes for the gradient of R rows before it is rounded, as much for
    their widened copy (twice on a CPU), 12 C H for a slice of C columns of the weight (at most 2048 on a CPU, 8192 on
    a GPU), and 40 N.

    target may lie on the CPU while hidden is on a GPU: it is then checked without a synchronisation. On the GPU,
    checking it waits for it once. ValueError (before any launch): shapes, dtypes or devices that do not match, a
    target out of range or banned, all of the vocabulary banned, a temperature that is not positive, a budget below one
    tile.
    """
    check_shapes(hidden_NH, weight_VH, target_N)
    banned = check_values(len(weight_VH), target_N, temperature, banned_ids)
    device = hidden_NH.device
    tiling = plan(len(hidden_NH), len(weight_VH), budget_bytes, device)
    tracked = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    if target_N.device != device:  # without waiting
        target_N = target_N.pin_memory().to(device, non_blocking=True)
    num_kept = tiling.max_live - 1 if tracked else 0
    job = _Job(target_N.long().contiguous(), float(temperature), banned, tiling, num_kept)
    return _LinearLogprob.apply(hidden_NH, weight_VH, job)


_Kept = dict[tuple[int, int], tuple[Tensor, bool]]  # tiles of logits, and whether they hold banned columns


@dataclass(frozen=True, slots=True)
class _Job:
    target_N: Tensor
    temperature: float
    banned: tuple[int, ...]
    tiling: Tiling
    num_kept: int  # tiles that the backward finds again


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of a call's rows: what one row of tiles reads."""

    rows: slice
    x_RH: gemm.Operand
    target_R: Tensor


def _chunks(hidden_NH: Tensor, job: _Job) -> list[_Chunk]:
    """A CPU has no product of half-precision operands with a float32 result: there they are widened."""
    x_NH = hidden_NH if hidden_NH.is_cuda else hidden_NH.float()
    slices = _slices(len(x_NH), job.tiling.num_rows)
    return [_Chunk(at, gemm.Operand(x_NH[at]), job.target_N[at]) for at in slices]


def _weight_slices(weight_VH: Tensor, job: _Job) -> Iterator[tuple[slice, gemm.Operand]]:
    for columns in _slices(len(weight_VH), job.tiling.num_columns):
        w_CH = weight_VH[columns]
        yield columns, gemm.Operand(w_CH if w_CH.is_cuda else w_CH.float())


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _logits(chunk: _Chunk, w_CH: gemm.Operand, columns: slice, job: _Job) -> tuple[Tensor, bool]:
    """One tile of logits, banned columns at -inf, and whether there are any."""
    tile = gemm.logits_tile(chunk.x_RH, w_CH)
    banned = [i - columns.start for i in job.banned if columns.start <= i < columns.stop]
    for column in banned:
        tile[:, column] = float("-inf")
    return tile, bool(banned)


def _walk_forward(hidden_NH: Tensor, weight_VH: Tensor, job: _Job) -> tuple[RowStats, _Kept]:
    """Statistics of every row, and the first `num_kept` tiles by (first row, first column)."""
    kept: _Kept = {}
    stats = RowStats.empty(len(hidden_NH), weight_VH.device)
    chunks = _chunks(hidden_NH, job)
    for columns, w_CH in _weight_slices(weight_VH, job):
        for chunk in chunks:
            tile, banned = _logits(chunk, w_CH, columns, job)
            rows.fold(tile, columns.start, stats.rows(chunk.rows), chunk.target_R, job.temperature, banned)
            if len(kept) < job.num_kept:
                kept[chunk.rows.start, columns.start] = tile, banned
            del tile
    return stats, kept


def _walk_backward(
    hidden_NH: Tensor, weight_VH: Tensor, job: _Job, grads: RowGrads, kept: _Kept, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of hidden, gradient of the weight), each in its dtype and only if wanted; uses up `kept`."""
    dx_NH = torch.zeros(hidden_NH.shape, device=weight_VH.device) if wanted[0] else None
    dw_VH = torch.empty_like(weight_VH) if wanted[1] else None
    chunks = _chunks(hidden_NH, job)
    for columns, w_CH in _weight_slices(weight_VH, job):
        dw_CH: Tensor | None = None
        for chunk in chunks:
            at = chunk.rows
            key = (at.start, columns.start)
            tile, banned = kept.pop(key) if key in kept else _logits(chunk, w_CH, columns, job)
            dlogits = rows.grad_in_place(
                tile, columns.start, grads.rows(at), chunk.target_R, job.temperature, banned, w_CH.whole.dtype
            )
            if dx_NH is not None:
                gemm.add_hidden_grad(dx_NH[at], dlogits, w_CH)
            if dw_VH is not None:
                dw_CH = gemm.weight_grad(dlogits, chunk.x_RH, dw_CH, only=len(chunks) == 1)
            del tile, dlogits
        if dw_VH is not None and dw_CH is not None:
            dw_VH[columns] = dw_CH
    return None if dx_NH is None else dx_NH.to(hidden_NH.dtype), dw_VH


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept = job, {}
        if not len(hidden_NH):
            ctx.save_for_backward(hidden_NH, weight_VH)
            return tuple(torch.zeros((2, 0), device=hidden_NH.device))
        with torch.autocast(hidden_NH.device.type, enabled=False):
            stats, ctx.kept = _walk_forward(hidden_NH, weight_VH, job)
            logprob_N, entropy_N, log_sum_N = stats.finish(job.temperature)
        ctx.save_for_backward(hidden_NH, weight_VH, stats.largest, log_sum_N, entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Any, Any, None]:
        hidden_NH, weight_VH, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if not saved:
            return hidden_NH if wanted[0] else None, torch.zeros_like(weight_VH) if wanted[1] else None, None
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros(len(hidden_NH), device=hidden_NH.device)
        grad_entropy_N = None if grad_entropy_N is None else grad_entropy_N.contiguous()
        with torch.autocast(hidden_NH.device.type, enabled=False):
            largest, log_sum, entropy = saved
            grads = RowGrads(largest, log_sum, entropy, grad_logprob_N.contiguous(), grad_entropy_N)
            dx_NH, dw_VH = _walk_backward(hidden_NH, weight_VH, ctx.job, grads, ctx.kept, wanted)
        return dx_NH, dw_VH, None
