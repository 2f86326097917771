"""The row functions of `kernels.rows` as Triton kernels: one row at a time per program, programs stay for many rows.

Rows are addressed in 64 bits (a tile may pass 2^31 elements), columns are read in blocks with a masked tail.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.row_records import RowGrads, RowStats

PROGRAMS_PER_PROCESSOR = 4
PROGRAMS_IN_INTERPRETER = 3  # fewer than rows, so that programs do stay for several


@triton.jit
def _fold(
    x_ptr, x_stride, target_ptr, inverse, largest_ptr, sum_exp_ptr, sum_exp_z_ptr, target_logit_ptr,
    num_rows, num_columns, first_column, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:
        largest = tl.load(largest_ptr + row)
        sum_exp = tl.load(sum_exp_ptr + row)
        sum_exp_z = tl.load(sum_exp_z_ptr + row)
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + columns, mask=columns < num_columns, other=float("-inf"))
            x = x.to(tl.float32)
            new_largest = tl.maximum(largest, tl.max(x, axis=0))
            shift = tl.maximum((largest - new_largest) * inverse, -1.0e4)
            z = (x - new_largest) * inverse
            e = tl.exp(z)
            scale = tl.exp(shift)
            sum_exp_z = (sum_exp_z + sum_exp * shift) * scale + tl.sum(tl.where(x == float("-inf"), 0.0, e * z), axis=0)
            sum_exp = sum_exp * scale + tl.sum(e, axis=0)
            largest = new_largest
        tl.store(largest_ptr + row, largest)
        tl.store(sum_exp_ptr + row, sum_exp)
        tl.store(sum_exp_z_ptr + row, sum_exp_z)
        column = tl.load(target_ptr + row) - first_column
        if (column >= 0) & (column < num_columns):
            tl.store(target_logit_ptr + row, tl.load(x_ptr + row * x_stride + column).to(tl.float32))
        row += tl.num_programs(0)


@triton.jit
def _grad(
    x_ptr, x_stride, out_ptr, out_stride, target_ptr, inverse, largest_ptr, log_sum_ptr, entropy_ptr,
    grad_logprob_ptr, grad_entropy_ptr, num_rows, num_columns, first_column,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:
        largest = tl.load(largest_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        g = tl.load(grad_logprob_ptr + row) * inverse
        column = tl.load(target_ptr + row) - first_column
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < num_columns
            x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
            logp = (x - largest) * inverse - log_sum
            slope = g
            if HAS_ENTROPY:
                h = tl.load(grad_entropy_ptr + row) * inverse
                slope = g + h * (logp + tl.load(entropy_ptr + row))
            d = tl.where(x == float("-inf"), 0.0, -slope * tl.exp(logp))
            d = tl.where(columns == column, d + g, d)
            # `out` may be the front half of the very row that is read: all of the block is read before any is written,
            # and no later block lies where this one writes.
            tl.debug_barrier()
            tl.store(out_ptr + row * out_stride + columns, d.to(out_ptr.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)


def _grid(tensor: Tensor) -> tuple[int]:
    if not tensor.is_cuda:
        return (min(tensor.shape[0], PROGRAMS_IN_INTERPRETER),)
    processors = torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return (min(tensor.shape[0], processors * PROGRAMS_PER_PROCESSOR),)


def _block(num_columns: int) -> int:
    return min(4096, max(128, triton.next_power_of_2(num_columns)))


def fold(tile_RC: Tensor, first_column: int, stats: RowStats, target_R: Tensor, temperature: float) -> None:
    """Fold one tile into the running statistics, in one launch."""
    with torch.cuda.device_of(tile_RC):
        _fold[_grid(tile_RC)](
            tile_RC, tile_RC.stride(0), target_R, 1.0 / temperature, stats.largest, stats.sum_exp, stats.sum_exp_z,
            stats.target_logit, tile_RC.shape[0], tile_RC.shape[1], first_column,
            BLOCK=_block(tile_RC.shape[1]), num_warps=8,
        )  # fmt: skip


def grad_in_place(
    tile_RC: Tensor,
    first_column: int,
    grads: RowGrads,
    target_R: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Overwrite a tile of logits by its gradient as `dtype`, which is not wider, in one launch.

    A narrower gradient lies in the front of each row's memory: the result is a view with the row stride of the tile.
    """
    ratio = tile_RC.dtype.itemsize // dtype.itemsize
    out_RC = tile_RC.view(dtype)[:, : tile_RC.shape[1]] if ratio > 1 else tile_RC
    with torch.cuda.device_of(tile_RC):
        _grad[_grid(tile_RC)](
            tile_RC, tile_RC.stride(0), out_RC, out_RC.stride(0), target_R, 1.0 / temperature, grads.largest,
            grads.log_sum.float(), grads.entropy, grads.grad_logprob, grads.grad_entropy, tile_RC.shape[0],
            tile_RC.shape[1],
            first_column, HAS_ENTROPY=grads.grad_entropy is not None,
            BLOCK=_block(tile_RC.shape[1]), num_warps=8,
        )  # fmt: skip
    return out_RC
