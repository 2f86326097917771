"""The functions of `kernels.rows` as Triton kernels, with one program per row.

Rows are addressed with 64 bits (a tile may have more than 2^31 elements); columns are read in blocks, the last of which
is masked. Rows that start at multiples of 16 columns are read four logits at a time. Values that differ between calls
(number of rows, alignment of the per-row vectors) are not compiled in, so that each vocabulary needs only one or two
versions of each kernel.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.row_records import FLOOR, RowGrads, RowStats, Tile

FOLD = {"BLOCK": 2048, "num_warps": 4}
GRAD = {"BLOCK": 1024, "num_warps": 4}
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(FLOOR)
SMALLEST = tl.constexpr(2.0**-126)  # smallest float32 number in full precision
PER_ROW = (
    "tile_largest_ptr", "target_ptr", "largest_ptr", "sum_exp_ptr", "sum_exp_z_ptr", "target_logit_ptr", "source_ptr",
    "slope_ptr", "entropy_slope_ptr", "at_target_ptr",
)  # fmt: skip


def _jit(function):
    """Compile a kernel without specialising it on the first column or the alignment of the per-row vectors."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(
        function,
        do_not_specialize=[name for name in names if name == "first_column"],
        do_not_specialize_on_alignment=[name for name in names if name in PER_ROW],
    )


@triton.jit
def _bounded(z):
    """Limit a number to +-1e4, whose exponentials are 0 and infinity. NaN stays NaN, so that it reaches the results."""
    z = tl.where(z < -1.0e4, -1.0e4, z)
    return tl.where(z > 1.0e4, 1.0e4, z)


@_jit
def _fold(
    x_ptr, x_stride, kept_ptr, kept_stride, tile_largest_ptr, target_ptr, inverse, largest_ptr, sum_exp_ptr,
    sum_exp_z_ptr, target_logit_ptr, num_columns, first_column, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold a row in two passes, the second of which reads from a cache. Exponentials are powers of 2 relative to the
    tile's largest logit."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    column = tl.load(target_ptr + row) - first_column
    has_target = (column >= 0) & (column < num_columns)
    target_logit = tl.load(x_ptr + column, mask=has_target, other=0.0)
    old_largest = tl.load(largest_ptr + row)
    old_sum = tl.load(sum_exp_ptr + row)
    old_sum_z = tl.load(sum_exp_z_ptr + row)
    scale = inverse * LOG2E
    top = tl.full((BLOCK,), LEAST, tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(x_ptr + columns, mask=columns < num_columns, other=float("-inf")))
    tile_largest = tl.max(top, axis=0)
    if kept_ptr is not None:
        tl.store(tile_largest_ptr + row, tile_largest)
        kept_ptr += row * kept_stride
    sum_exp = tl.zeros((BLOCK,), tl.float32)
    sum_exp_z = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < num_columns, other=float("-inf"))
        z = (x - tile_largest) * scale
        e = tl.exp2(z)  # NaN stays NaN, so that it reaches the results
        sum_exp += e
        sum_exp_z += e * tl.maximum(z, -1.0e4)  # avoids 0 * inf for a banned token
        if kept_ptr is not None:
            tl.store(kept_ptr + columns, e.to(kept_ptr.dtype.element_ty), mask=columns < num_columns)
    own_sum = tl.sum(sum_exp, axis=0)
    own_sum_z = tl.sum(sum_exp_z, axis=0)
    largest = tl.maximum(old_largest, tile_largest)
    z = _bounded((tile_largest - largest) * scale)
    e = tl.exp2(z)
    old_z = _bounded((old_largest - largest) * scale)
    old_e = tl.exp2(old_z)
    tl.store(sum_exp_z_ptr + row, (old_sum_z + old_sum * old_z * LN2) * old_e + LN2 * (own_sum_z + own_sum * z) * e)
    tl.store(sum_exp_ptr + row, old_sum * old_e + own_sum * e)
    tl.store(largest_ptr + row, largest)
    if has_target:
        tl.store(target_logit_ptr + row, target_logit)


@_jit
def _grad(
    x_ptr, x_stride, source_ptr, tile_largest_ptr, out_ptr, out_stride, target_ptr, inverse, largest_ptr, slope_ptr,
    entropy_slope_ptr, at_target_ptr, num_columns, first_column, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient. `x` holds logits or, if `tile_largest` is given, the exponentials that `_fold` has kept."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if source_ptr is not None:
        source = tl.load(source_ptr + row)
    x_ptr += source * x_stride
    out_ptr += row * out_stride
    largest = tl.load(largest_ptr + row)
    slope = tl.load(slope_ptr + row)
    column = tl.load(target_ptr + row) - first_column
    at_target = tl.load(at_target_ptr + row)
    if entropy_slope_ptr is not None:
        entropy_slope = tl.load(entropy_slope_ptr + row)
    if tile_largest_ptr is not None:
        behind = _bounded((tl.load(tile_largest_ptr + source) - largest) * inverse)
        share = tl.exp2(behind * LOG2E)
        first = share * slope  # the gradient is x * (first - second * log2(x))
        if entropy_slope_ptr is not None:
            first = share * (slope - entropy_slope * behind)
            second = share * entropy_slope * LN2
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        if tile_largest_ptr is not None:
            d = x * first
            if entropy_slope_ptr is not None:
                d = x * (first - second * tl.log2(tl.maximum(x, SMALLEST)))
        else:
            z = _bounded((x - largest) * inverse)
            e = tl.exp2(z * LOG2E)
            d = e * slope
            if entropy_slope_ptr is not None:
                d = e * (slope - entropy_slope * z)
        d = tl.where(columns == column, at_target, d)
        tl.store(out_ptr + columns, d.to(out_ptr.dtype.element_ty), mask=columns < num_columns)


def fold(
    tile: Tile, first_column: int, stats: RowStats, target_R: Tensor, temperature: float, kept: Tile | None
) -> None:
    """Compute `kernels.rows.fold` in one launch."""
    x_RC, kept_RC = tile.values, None if kept is None else kept.values
    with torch.cuda.device_of(x_RC):
        _fold[(x_RC.shape[0],)](
            x_RC, x_RC.stride(0), kept_RC, 0 if kept_RC is None else kept_RC.stride(0),
            None if kept is None else kept.largest, target_R, 1.0 / temperature, stats.largest, stats.sum_exp,
            stats.sum_exp_z, stats.target_logit, x_RC.shape[1], first_column, **FOLD,
        )  # fmt: skip


def write_grad(
    tile: Tile,
    first_column: int,
    grads: RowGrads,
    target_R: Tensor,
    temperature: float,
    out_RC: Tensor,
    source_R: Tensor | None,
) -> None:
    """Compute `kernels.rows.write_grad` in one launch."""
    x_RC = tile.values
    with torch.cuda.device_of(x_RC):
        _grad[(out_RC.shape[0],)](
            x_RC, x_RC.stride(0), source_R, tile.largest, out_RC, out_RC.stride(0), target_R, 1.0 / temperature,
            grads.largest, grads.slope, grads.entropy_slope, grads.at_target, x_RC.shape[1], first_column, **GRAD,
        )  # fmt: skip
