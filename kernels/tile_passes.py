"""Forward and backward over the [rows x vocabulary] plane of logits, tile by tile: slices of the vocabulary, chunks of
rows.

The forward folds every tile of logits into softmax statistics per row. The backward computes the tiles' gradients and
multiplies them with the operands. Tiles that the forward kept within the byte budget are reused, others are computed
again; rows without an upstream gradient are left out. Kept tiles are float32 logits or, for half-precision operands,
bfloat16 exponentials (`kernels.row_records.Tile`).

Suffixes: N rows of the call, H hidden size, V vocabulary, R rows of one chunk, C columns of one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import gemm, rows
from kernels.row_records import RowGrads, RowStats, RowsWithGradient, Tile
from kernels.tiles import Tiling

ROW_ALIGNMENT = 16  # in columns; lets Triton read four logits at a time


@dataclass(frozen=True, slots=True)
class LogprobTask:
    """The arguments of a call besides its hidden states and its weight."""

    target_N: Tensor
    temperature: float
    banned: tuple[int, ...]
    tiling: Tiling


@dataclass(frozen=True, slots=True)
class _RowChunk:
    """A chunk of a pass's rows, with all that its tiles need."""

    first_row: int  # index in the call; with the first column it identifies a tile
    rows: slice  # index in the pass
    x_RH: gemm.Operand
    target_R: Tensor
    source_R: Tensor | None = None  # indices of these rows in a kept tile; None = all rows, in order


@dataclass(frozen=True, slots=True)
class _TileBuffers:
    """Memory for tiles: one reused tile for each dtype, and the memory for kept tiles."""

    tiling: Tiling
    device: torch.device
    reused: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return one piece of memory for `count` tiles."""
        columns = self.tiling.num_columns
        stride = columns if self.device.type == "cpu" else -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return torch.empty((count, self.tiling.num_rows, stride), dtype=dtype, device=self.device)

    def tile(self, num_rows: int, columns: slice, dtype: torch.dtype) -> Tensor:
        """Return the reused memory of this dtype for a tile [num_rows, columns]."""
        if dtype not in self.reused:
            self.reused[dtype] = self.allocate(1, dtype)[0]
        return _corner(self.reused[dtype], num_rows, columns)


def _corner(memory: Tensor, num_rows: int, columns: slice) -> Tensor:
    """Return the part [num_rows, columns] of a tile's memory: with aligned rows on a GPU, without gaps on a CPU."""
    num_columns = columns.stop - columns.start
    if memory.device.type == "cpu":
        return memory.view(-1)[: num_rows * num_columns].view(num_rows, num_columns)
    return memory[:num_rows, :num_columns]


KeptTiles = dict[tuple[int, int], Tile]  # key: (first row, first column)


def forward(hidden_NH: Tensor, weight_VH: Tensor, task: LogprobTask) -> tuple[RowStats, KeptTiles]:
    """Return the statistics of every row, and the first `num_kept` tiles."""
    kept: KeptTiles = {}
    tiling, buffers = task.tiling, _TileBuffers(task.tiling, weight_VH.device)
    stats = RowStats.empty(len(hidden_NH), weight_VH.device)
    chunks = _chunks(hidden_NH, task)
    half = chunks[0].x_RH.whole.dtype != torch.float32
    memory = buffers.allocate(tiling.num_kept, torch.bfloat16 if half else torch.float32)
    largest = torch.empty((tiling.num_kept, tiling.num_rows if half else 0), device=weight_VH.device)
    for columns, w_CH in _weight_slices(weight_VH, task):
        for chunk in chunks:
            num_rows, number = len(chunk.target_R), len(kept)
            kept_tile = _corner(memory[number], num_rows, columns) if number < tiling.num_kept else None
            out = buffers.tile(num_rows, columns, torch.float32) if kept_tile is None or half else kept_tile
            tile, exponentials = _logits(chunk, w_CH, columns, task, out), None
            if kept_tile is not None:
                if half:
                    exponentials = Tile(kept_tile, tile.banned, largest[number, :num_rows])
                kept[chunk.first_row, columns.start] = exponentials or tile
            rows.fold(tile, columns.start, stats.rows(chunk.rows), chunk.target_R, task.temperature, exponentials)
    return stats, kept


def backward(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    task: LogprobTask,
    grads: RowGrads,
    with_gradient: RowsWithGradient,
    kept: KeptTiles,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return (gradient of hidden, gradient of the weight), each in its dtype, or None if not wanted. Empties `kept`."""
    buffers = _TileBuffers(task.tiling, weight_VH.device)
    dw_VH = torch.empty_like(weight_VH) if wanted[1] else None
    dx: Tensor | None = None  # float32, only the computed rows
    chunks, some = _chunks(hidden_NH, task), None
    for number, (columns, w_CH) in enumerate(_weight_slices(weight_VH, task)):
        if number == with_gradient.slices_before:
            some = with_gradient.rows()
            if some is not None:
                chunks = _chunks_of(some, chunks)
                some = some.pin_memory().to(weight_VH.device, non_blocking=True) if weight_VH.is_cuda else some
                grads = grads.rows(some)
                dx = None if dx is None else dx.index_select(0, some)
        if wanted[0] and dx is None:
            dx = torch.empty((len(grads.largest), hidden_NH.shape[1]), device=weight_VH.device)
        grad_CH = None if dw_VH is None else dw_VH[columns]
        _grad_of_slice(columns, w_CH, chunks, task, grads, kept, buffers, (dx, number == 0), grad_CH)
    kept.clear()
    if dx is not None and some is not None:
        return torch.zeros_like(hidden_NH).index_copy_(0, some, dx.to(hidden_NH.dtype)), dw_VH
    return None if dx is None else dx.to(hidden_NH.dtype), dw_VH


def _grad_of_slice(
    columns: slice,
    w_CH: gemm.Operand,
    chunks: list[_RowChunk],
    task: LogprobTask,
    grads: RowGrads,
    kept: KeptTiles,
    buffers: _TileBuffers,
    hidden_grad: tuple[Tensor | None, bool],
    grad_CH: Tensor | None,
) -> None:
    """Add one slice's part to the gradient of the hidden states, or write it if that is new; write the slice's own
    gradient."""
    dx, is_new = hidden_grad
    total_CH = grad_CH
    if grad_CH is not None:
        if not chunks:
            grad_CH.zero_()
        in_place = grad_CH.dtype == torch.float32 or (len(chunks) == 1 and grad_CH.dtype == w_CH.whole.dtype)
        total_CH = grad_CH if in_place else torch.empty_like(grad_CH, dtype=torch.float32)
    for number, chunk in enumerate(chunks):
        dlogits = _dlogits(chunk, w_CH, columns, task, grads.rows(chunk.rows), kept, buffers)
        if dx is not None:
            gemm.add_hidden_grad(dx[chunk.rows], dlogits, w_CH, new=is_new)
        if total_CH is not None:
            gemm.add_weight_grad(total_CH, dlogits, chunk.x_RH, new=number == 0)
    if chunks and grad_CH is not None and total_CH is not None and total_CH is not grad_CH:
        grad_CH.copy_(total_CH)


def _dlogits(
    chunk: _RowChunk,
    w_CH: gemm.Operand,
    columns: slice,
    task: LogprobTask,
    grads: RowGrads,
    kept: KeptTiles,
    buffers: _TileBuffers,
) -> Tensor:
    """Return the gradient of a tile's logits, in the operands' dtype. It overwrites a kept tile if the sizes match."""
    num_rows, dtype = len(chunk.target_R), w_CH.whole.dtype
    tile, source_R = kept.pop((chunk.first_row, columns.start), None), chunk.source_R
    if tile is None:
        tile = _logits(chunk, w_CH, columns, task, buffers.tile(num_rows, columns, torch.float32))
        source_R = None
    in_place = source_R is None and tile.values.dtype == dtype
    out_RC = tile.values if in_place else buffers.tile(num_rows, columns, dtype)
    rows.write_grad(tile, columns.start, grads, chunk.target_R, task.temperature, out_RC, source_R)
    return out_RC


def _logits(chunk: _RowChunk, w_CH: gemm.Operand, columns: slice, task: LogprobTask, out_RC: Tensor) -> Tile:
    gemm.logits_tile(chunk.x_RH, w_CH, out_RC)
    banned = [token - columns.start for token in task.banned if columns.start <= token < columns.stop]
    for column in banned:
        out_RC[:, column] = float("-inf")
    return Tile(out_RC, bool(banned))


def _chunks(hidden_NH: Tensor, task: LogprobTask) -> list[_RowChunk]:
    x_NH = gemm.widened(hidden_NH)
    slices = _slices(len(x_NH), task.tiling.num_rows)
    return [_RowChunk(each.start, each, gemm.Operand(x_NH[each]), task.target_N[each]) for each in slices]


def _chunks_of(some: Tensor, chunks: list[_RowChunk]) -> list[_RowChunk]:
    """Return the chunks restricted to `some` rows of the call, ascending int64 on the CPU, without chunks that have
    none."""
    selected, start = [], 0
    for chunk in chunks:
        source_r = some[(some >= chunk.rows.start) & (some < chunk.rows.stop)] - chunk.rows.start
        if len(source_r):
            if chunk.target_R.is_cuda:
                source_r = source_r.pin_memory().to(chunk.target_R.device, non_blocking=True)
            rows_of_chunk = slice(start, start + len(source_r))
            x = gemm.Operand(chunk.x_RH.whole.index_select(0, source_r))
            selected.append(
                _RowChunk(chunk.first_row, rows_of_chunk, x, chunk.target_R.index_select(0, source_r), source_r)
            )
            start = rows_of_chunk.stop
    return selected


def _weight_slices(weight_VH: Tensor, task: LogprobTask) -> Iterator[tuple[slice, gemm.Operand]]:
    for columns in _slices(len(weight_VH), task.tiling.num_columns):
        yield columns, gemm.Operand(gemm.widened(weight_VH[columns]))


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
