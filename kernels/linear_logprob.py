"""Log-probability of the sampled token and entropy, straight from hidden states: logits exist one tile at a time.

The vocabulary is walked in slices and the rows in chunks. The forward folds every tile of logits into softmax
statistics per row; the backward overwrites the same tiles by their gradients and multiplies them out: tiles that the
byte budget kept are used again, the others are computed again. A slice of the weight's gradient is summed in float32
over all rows before it is written, so it needs no float32 buffer of the weight's size.

Suffixes: N rows (tokens), H hidden size, V vocabulary, R rows of one call to the row functions.
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
from kernels.head import whole
from kernels.tiles import Tiling, default_budget_bytes, plan


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    banned_ids: Sequence[int] | Tensor | None = None,
    mask_N: Tensor | None = None,
    needs_grad_N: Tensor | None = None,
    precise: bool = True,
    budget_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprob_N, entropy_N) of softmax(hidden @ weight.T / temperature), float32, without the [N, V] logits.

    hidden [N, H] and weight [V, H] share a device and a dtype: float32, bfloat16 or float16. Gradients reach both.
    target [N]: int64 or int32, the sampled tokens. temperature: a number or [N], above 0.
    banned_ids: tokens of probability 0. mask [N] bool: rows that are False are not computed, and are 0 in both
    results. needs_grad [N] bool: rows that are False get results without gradient, and cost no backward.
    precise: logits in float32; False: in the dtype of the inputs. budget_bytes bounds the logits that exist at a
    time, kept ones included (64 MiB on a CPU, a tenth of the memory of a GPU). Beyond it and the two gradients:
    4 R H bytes for the gradient of R rows before it is rounded, as much for their gathered or widened copy (twice on
    a CPU), 12 C H for a slice of C columns of the weight (at most 2048 on a CPU, 8192 on a GPU), and 40 N.

    target, temperature, mask and needs_grad may lie on the CPU while hidden is on a GPU: they are then checked and
    compacted without a synchronisation. On the GPU, checking them waits for it once.
    A weight that is a DTensor is gathered here, and its gradient summed over ranks; `GatheredHead` does so once for
    many calls. ValueError (before any launch): shapes, dtypes or devices that do not match, a target out of range or
    banned, all of the vocabulary banned, a temperature that is not positive, a budget below one tile.
    """
    check_shapes(hidden_NH, weight_VH, target_N, temperature, mask_N, needs_grad_N)
    banned = check_values(weight_VH.shape[0], target_N, temperature, banned_ids, mask_N)
    device, vocab_size = hidden_NH.device, weight_VH.shape[0]
    dtype = torch.float32 if precise else hidden_NH.dtype
    budget = default_budget_bytes(device) if budget_bytes is None else budget_bytes
    tiling = plan(hidden_NH.shape[0], vocab_size, dtype.itemsize, budget, device)
    weight_VH = whole(weight_VH)
    tracked = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    with_grad, without_grad = _split_rows(hidden_NH.shape[0], mask_N, needs_grad_N, tracked, device)
    job = _Job(
        target_N=_to(target_N, device).long().contiguous(),
        temperature_N=_temperature(temperature, hidden_NH.shape[0], device),
        banned=tuple(sorted(banned)),
        with_grad=with_grad,
        without_grad=without_grad,
        tiling=tiling,
        logits_dtype=dtype,
    )
    return _LinearLogprob.apply(hidden_NH, weight_VH, job)


_ALL = slice(None)
_Kept = dict[tuple[int, int], tuple[Tensor, bool]]  # tiles of logits, and whether they hold banned columns


@dataclass(frozen=True, slots=True)
class _Job:
    target_N: Tensor
    temperature_N: Tensor | None
    banned: tuple[int, ...]
    with_grad: Tensor | slice | None  # rows: indices, all of them, or none
    without_grad: Tensor | slice | None
    tiling: Tiling
    logits_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of a call's rows, gathered: what one row of tiles reads. `rows` is where they lie in their group."""

    rows: slice
    x_RH: gemm.Operand
    target_R: Tensor
    temperature_R: Tensor | None


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Move without waiting: what comes from the CPU goes through pinned memory."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _temperature(temperature: float | Tensor, num_rows: int, device: torch.device) -> Tensor | None:
    if isinstance(temperature, Tensor):
        return _to(temperature.detach().float(), device).expand(num_rows).contiguous()
    return None if temperature == 1.0 else torch.full((num_rows,), temperature, device=device)


def _split_rows(
    num_rows: int, mask_N: Tensor | None, needs_grad_N: Tensor | None, tracked: bool, device: torch.device
) -> tuple[Tensor | slice | None, Tensor | slice | None]:
    """Rows with and without a backward; every row is in one group, or in none where the mask leaves it out."""
    if not tracked:
        needs_grad_N = None
    if needs_grad_N is None:
        chosen: Tensor | slice | None = _ALL if mask_N is None else _indices(mask_N, device)
        return (chosen, None) if tracked else (None, chosen)
    if mask_N is None:
        return _indices(needs_grad_N, device), _indices(~needs_grad_N, device)
    if mask_N.device != needs_grad_N.device:
        mask_N, needs_grad_N = _to(mask_N, device), _to(needs_grad_N, device)
    return _indices(mask_N & needs_grad_N, device), _indices(mask_N & ~needs_grad_N, device)


def _indices(chosen_N: Tensor, device: torch.device) -> Tensor | None:
    index = chosen_N.nonzero().flatten()
    return _to(index, device) if index.numel() else None


def _gather(hidden_NH: Tensor, job: _Job, index: Tensor | slice) -> list[_Chunk]:
    """A group of rows as chunks. A CPU has no product of half-precision operands with a float32 result."""
    x_RH = hidden_NH[index].to(hidden_NH.dtype if hidden_NH.is_cuda else job.logits_dtype)
    target_R, temperature_R = job.target_N[index], None if job.temperature_N is None else job.temperature_N[index]
    return [
        _Chunk(at, gemm.Operand(x_RH[at]), target_R[at], None if temperature_R is None else temperature_R[at])
        for at in _slices(len(x_RH), job.tiling.num_rows)
    ]


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _logits(chunk: _Chunk, w_CH: gemm.Operand, columns: slice, job: _Job) -> tuple[Tensor, bool]:
    """One tile of logits, banned columns at -inf, and whether there are any."""
    tile = gemm.logits_tile(chunk.x_RH, w_CH, job.logits_dtype)
    banned = [i - columns.start for i in job.banned if columns.start <= i < columns.stop]
    for column in banned:
        tile[:, column] = float("-inf")
    return tile, bool(banned)


def _weight_slices(weight_VH: Tensor, job: _Job) -> Iterator[tuple[slice, gemm.Operand]]:
    dtype = weight_VH.dtype if weight_VH.is_cuda else job.logits_dtype
    for columns in _slices(len(weight_VH), job.tiling.num_columns):
        yield columns, gemm.Operand(weight_VH[columns].to(dtype))


def _walk_forward(chunks: list[_Chunk], weight_VH: Tensor, job: _Job, num_kept: int) -> tuple[rows.RowStats, _Kept]:
    """Statistics of every row, and the first `num_kept` tiles by (first row, first column)."""
    kept: _Kept = {}
    stats = rows.RowStats.empty(chunks[-1].rows.stop, weight_VH.device)
    for columns, w_CH in _weight_slices(weight_VH, job):
        for chunk in chunks:
            tile, banned = _logits(chunk, w_CH, columns, job)
            rows.fold(tile, columns.start, stats.rows(chunk.rows), chunk.target_R, chunk.temperature_R, banned)
            if len(kept) < num_kept:
                kept[chunk.rows.start, columns.start] = tile, banned
            del tile
    return stats, kept


def _walk_backward(
    chunks: list[_Chunk], weight_VH: Tensor, job: _Job, grads: rows.RowGrads, kept: _Kept, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of x in float32, gradient of the weight in its dtype), each only if wanted; uses up `kept`."""
    num_rows, device = chunks[-1].rows.stop, weight_VH.device
    dx_RH = torch.zeros((num_rows, weight_VH.shape[1]), device=device) if wanted[0] else None
    dw_VH = torch.empty_like(weight_VH) if wanted[1] else None
    for columns, w_CH in _weight_slices(weight_VH, job):
        dw_CH: Tensor | None = None
        for chunk in chunks:
            at = chunk.rows
            key = (at.start, columns.start)
            tile, banned = kept.pop(key) if key in kept else _logits(chunk, w_CH, columns, job)
            dlogits = rows.grad_in_place(
                tile, columns.start, grads.rows(at), chunk.target_R, chunk.temperature_R, banned, w_CH.whole.dtype
            )
            if dx_RH is not None:
                gemm.add_hidden_grad(dx_RH[at], dlogits, w_CH)
            if dw_VH is not None:
                dw_CH = gemm.weight_grad(dlogits, chunk.x_RH, dw_CH, last=len(chunks) == 1)
            del tile, dlogits
        if dw_VH is not None and dw_CH is not None:
            dw_VH[columns] = dw_CH
    return dx_RH, dw_VH


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        results = torch.zeros((2, hidden_NH.shape[0]), device=hidden_NH.device)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept = job, {}
        saved: list[Tensor] = []
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for index in (job.without_grad, job.with_grad):
                if index is None or not hidden_NH.shape[0]:
                    continue
                chunks = _gather(hidden_NH, job, index)
                num_kept = job.tiling.max_live - 1 if index is job.with_grad else 0
                stats, kept = _walk_forward(chunks, weight_VH, job, num_kept)
                temperature_R = None if job.temperature_N is None else job.temperature_N[index]
                logprob, entropy, log_sum = stats.finish(temperature_R)
                results[0, index], results[1, index] = logprob, entropy
                if index is job.with_grad:
                    ctx.kept, saved = kept, [stats.largest, log_sum, entropy]
        ctx.save_for_backward(hidden_NH, weight_VH, *saved)
        return results[0], results[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Any, Any, None]:
        hidden_NH, weight_VH, *saved = ctx.saved_tensors
        job, wanted = ctx.job, ctx.needs_input_grad[:2]
        if not saved:
            zeros = [
                torch.zeros_like(t) if want else None for t, want in zip((hidden_NH, weight_VH), wanted, strict=True)
            ]
            return zeros[0], zeros[1], None
        index = job.with_grad
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros(hidden_NH.shape[0], device=hidden_NH.device)
        grad_entropy = None if grad_entropy_N is None else grad_entropy_N[index].contiguous()
        with torch.autocast(hidden_NH.device.type, enabled=False):
            largest, log_sum, entropy = saved
            grads = rows.RowGrads(largest, log_sum, entropy, grad_logprob_N[index].contiguous(), grad_entropy)
            dx_RH, dw_VH = _walk_backward(_gather(hidden_NH, job, index), weight_VH, job, grads, ctx.kept, wanted)
        if dx_RH is not None and index is not _ALL:
            dhidden_NH = torch.zeros_like(hidden_NH)
            dhidden_NH[index] = dx_RH.to(hidden_NH.dtype)
            return dhidden_NH, dw_VH, None
        return None if dx_RH is None else dx_RH.to(hidden_NH.dtype), dw_VH, None
