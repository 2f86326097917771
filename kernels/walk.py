"""The two walks over the [rows x vocabulary] plane of logits, tile by tile: slices of the vocabulary, chunks of rows.

The forward folds every tile of logits into softmax statistics per row. The backward writes the tiles' gradients and
multiplies them out: tiles that the byte budget kept are used again, the others are computed again; rows without an
upstream gradient are left out. Kept tiles are logits in float32, or of half-precision operands exponentials in
bfloat16 (`kernels.row_records.Tile`).

Suffixes: N rows of the call, H hidden size, V vocabulary, R rows of one chunk, C columns of one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import gemm, rows
from kernels.row_records import RowGrads, RowStats, Tile
from kernels.tiles import Tiling
from kernels.upstream import RowsWithGradient

ROW_ALIGNMENT = 16  # columns, so that Triton reads four logits at a time


@dataclass(frozen=True, slots=True)
class Job:
    target_N: Tensor
    temperature: float
    banned: tuple[int, ...]
    tiling: Tiling


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of a walk's rows: what one row of tiles reads."""

    first_row: int  # of the call's: names the tiles
    at: slice  # among the walk's rows
    x_RH: gemm.Operand
    target_R: Tensor
    source_R: Tensor | None = None  # which rows of a kept tile these are; None = all, in their order


@dataclass(frozen=True, slots=True)
class _Memory:
    """Places for tiles: one at a time for each dtype, which is used again and again, and those of kept tiles."""

    tiling: Tiling
    device: torch.device
    places: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def many(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for `count` tiles in one piece."""
        columns = self.tiling.num_columns
        stride = columns if self.device.type == "cpu" else -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return torch.empty((count, self.tiling.num_rows, stride), dtype=dtype, device=self.device)

    def place(self, num_rows: int, columns: slice, dtype: torch.dtype) -> Tensor:
        if dtype not in self.places:
            self.places[dtype] = self.many(1, dtype)[0]
        return _corner(self.places[dtype], num_rows, columns)


def _corner(room: Tensor, num_rows: int, columns: slice) -> Tensor:
    """[num_rows, columns] of a tile's room: on a GPU all rows start aligned, on a CPU they have no gaps."""
    num_columns = columns.stop - columns.start
    if room.device.type == "cpu":
        return room.view(-1)[: num_rows * num_columns].view(num_rows, num_columns)
    return room[:num_rows, :num_columns]


Kept = dict[tuple[int, int], Tile]  # by first row and column


def forward(hidden_NH: Tensor, weight_VH: Tensor, job: Job) -> tuple[RowStats, Kept]:
    """Statistics of every row, and the first `num_kept` tiles."""
    kept: Kept = {}
    tiling, memory = job.tiling, _Memory(job.tiling, weight_VH.device)
    stats = RowStats.empty(len(hidden_NH), weight_VH.device)
    chunks = _chunks(hidden_NH, job)
    half = chunks[0].x_RH.whole.dtype != torch.float32
    room = memory.many(tiling.num_kept, torch.bfloat16 if half else torch.float32)
    largest = torch.empty((tiling.num_kept, tiling.num_rows if half else 0), device=weight_VH.device)
    for columns, w_CH in _weight_slices(weight_VH, job):
        for chunk in chunks:
            num_rows, number = len(chunk.target_R), len(kept)
            spot = _corner(room[number], num_rows, columns) if number < tiling.num_kept else None
            place = memory.place(num_rows, columns, torch.float32) if spot is None or half else spot
            tile, exponentials = _logits(chunk, w_CH, columns, job, place), None
            if spot is not None:
                if half:
                    exponentials = Tile(spot, tile.banned, largest[number, :num_rows])
                kept[chunk.first_row, columns.start] = exponentials or tile
            rows.fold(tile, columns.start, stats.rows(chunk.at), chunk.target_R, job.temperature, exponentials)
    return stats, kept


def backward(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    job: Job,
    grads: RowGrads,
    with_gradient: RowsWithGradient,
    kept: Kept,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of hidden, gradient of the weight), each in its dtype and only if wanted; uses up `kept`."""
    memory = _Memory(job.tiling, weight_VH.device)
    dw_VH = torch.empty_like(weight_VH) if wanted[1] else None
    dx: Tensor | None = None  # float32, of the rows that are walked
    chunks, some = _chunks(hidden_NH, job), None
    for number, (columns, w_CH) in enumerate(_weight_slices(weight_VH, job)):
        if number == with_gradient.slices_before:
            some = with_gradient.rows()
            if some is not None:
                chunks = _chunks_of(some, chunks)
                some = some.pin_memory().to(weight_VH.device, non_blocking=True) if weight_VH.is_cuda else some
                grads = grads.rows(some)
                dx = None if dx is None else dx.index_select(0, some)
        if wanted[0] and dx is None:
            dx = torch.empty((len(grads.largest), hidden_NH.shape[1]), device=weight_VH.device)
        place_CH = None if dw_VH is None else dw_VH[columns]
        _grad_of_slice(columns, w_CH, chunks, job, grads, kept, memory, (dx, number == 0), place_CH)
    kept.clear()
    if dx is not None and some is not None:
        return torch.zeros_like(hidden_NH).index_copy_(0, some, dx.to(hidden_NH.dtype)), dw_VH
    return None if dx is None else dx.to(hidden_NH.dtype), dw_VH


def _grad_of_slice(
    columns: slice,
    w_CH: gemm.Operand,
    chunks: list[_Chunk],
    job: Job,
    grads: RowGrads,
    kept: Kept,
    memory: _Memory,
    hidden_grad: tuple[Tensor | None, bool],
    place_CH: Tensor | None,
) -> None:
    """Add what one slice gives to the gradient of the hidden states, which is new or not; write the slice's own."""
    dx, is_new = hidden_grad
    total_CH = place_CH
    if place_CH is not None:
        if not chunks:
            place_CH.zero_()
        in_place = place_CH.dtype == torch.float32 or (len(chunks) == 1 and place_CH.dtype == w_CH.whole.dtype)
        total_CH = place_CH if in_place else torch.empty_like(place_CH, dtype=torch.float32)
    for number, chunk in enumerate(chunks):
        dlogits = _dlogits(chunk, w_CH, columns, job, grads.rows(chunk.at), kept, memory)
        if dx is not None:
            gemm.add_hidden_grad(dx[chunk.at], dlogits, w_CH, new=is_new)
        if total_CH is not None:
            gemm.add_weight_grad(total_CH, dlogits, chunk.x_RH, new=number == 0)
    if chunks and place_CH is not None and total_CH is not None and total_CH is not place_CH:
        place_CH.copy_(total_CH)


def _dlogits(
    chunk: _Chunk, w_CH: gemm.Operand, columns: slice, job: Job, grads: RowGrads, kept: Kept, memory: _Memory
) -> Tensor:
    """The gradient of a tile's logits, in the operands' dtype; it takes a kept tile's place where it fits there."""
    num_rows, dtype = len(chunk.target_R), w_CH.whole.dtype
    tile, source_R = kept.pop((chunk.first_row, columns.start), None), chunk.source_R
    if tile is None:
        tile = _logits(chunk, w_CH, columns, job, memory.place(num_rows, columns, torch.float32))
        source_R = None
    in_place = source_R is None and tile.values.dtype == dtype
    out_RC = tile.values if in_place else memory.place(num_rows, columns, dtype)
    rows.write_grad(tile, columns.start, grads, chunk.target_R, job.temperature, out_RC, source_R)
    return out_RC


def _logits(chunk: _Chunk, w_CH: gemm.Operand, columns: slice, job: Job, out_RC: Tensor) -> Tile:
    gemm.logits_tile(chunk.x_RH, w_CH, out_RC)
    banned = [token - columns.start for token in job.banned if columns.start <= token < columns.stop]
    for column in banned:
        out_RC[:, column] = float("-inf")
    return Tile(out_RC, bool(banned))


def _chunks(hidden_NH: Tensor, job: Job) -> list[_Chunk]:
    x_NH = gemm.widened(hidden_NH)
    slices = _slices(len(x_NH), job.tiling.num_rows)
    return [_Chunk(at.start, at, gemm.Operand(x_NH[at]), job.target_N[at]) for at in slices]


def _chunks_of(some: Tensor, chunks: list[_Chunk]) -> list[_Chunk]:
    """The chunks of some rows of the call, ascending int64 on the CPU; chunks without any are left out."""
    found, start = [], 0
    for chunk in chunks:
        source_r = some[(some >= chunk.at.start) & (some < chunk.at.stop)] - chunk.at.start
        if len(source_r):
            if chunk.target_R.is_cuda:
                source_r = source_r.pin_memory().to(chunk.target_R.device, non_blocking=True)
            at, x = slice(start, start + len(source_r)), gemm.Operand(chunk.x_RH.whole.index_select(0, source_r))
            found.append(_Chunk(chunk.first_row, at, x, chunk.target_R.index_select(0, source_r), source_r))
            start = at.stop
    return found


def _weight_slices(weight_VH: Tensor, job: Job) -> Iterator[tuple[slice, gemm.Operand]]:
    for columns in _slices(len(weight_VH), job.tiling.num_columns):
        yield columns, gemm.Operand(gemm.widened(weight_VH[columns]))


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
