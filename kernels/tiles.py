"""The division of the [rows x vocabulary] plane of logits into tiles, and the number of tiles that a byte budget can
keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_TILE = (128, 1024)  # rows, columns; less if the plane is smaller
CPU_TILE = (1024, 2048)  # 8 MiB of float32, less than a last-level cache
GPU_ROWS = 16384
# 132 multiprocessors compute blocks of 128 x 256: with this width, tiles of 16,384 rows are whole waves of blocks.
GPU_COLUMNS = 33 * 256
MOST_GPU_COLUMNS = 4 * GPU_COLUMNS  # for a quarter of these rows or fewer, whose waves are whole too
CPU_BUDGET_BYTES = 64 << 20
LOGIT_BYTES, EXPONENTIAL_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of `num_rows` x `num_columns`; the first `num_kept` of them are kept for the backward."""

    num_rows: int
    num_columns: int
    num_kept: int


def plan(
    num_rows: int, vocab_size: int, budget_bytes: int | None, device: torch.device, *, half: bool, tracked: bool
) -> Tiling:
    """Return the largest tile that the budget allows, up to the device's preferred size, and the number of tiles that
    fit besides.

    `half`: gradients and kept tiles have half as many bytes as logits. `tracked`: a backward will follow. The default
    budget is 64 MiB on a CPU; on a GPU a tenth of its memory, or half of the free memory if that is less. Raise
    ValueError if the budget is below the smallest tile.
    """
    on_gpu = device.type == "cuda"
    small_rows, small_columns = min(num_rows, SMALLEST_TILE[0]), min(vocab_size, SMALLEST_TILE[1])
    # a logit, and its gradient if that has other memory
    place_bytes = LOGIT_BYTES + (EXPONENTIAL_BYTES if half and tracked else 0)
    least = small_rows * small_columns * place_bytes
    if budget_bytes is None:
        budget_bytes = max(least, _gpu_budget(device)) if on_gpu else CPU_BUDGET_BYTES
    if budget_bytes < least:
        raise ValueError(
            f"budget_bytes={budget_bytes} is too small for one tile of {small_rows} x {small_columns} logits: "
            f"give at least {least}"
        )
    want_rows, want_columns = (GPU_ROWS, _gpu_columns(num_rows)) if on_gpu else CPU_TILE
    rows, columns = max(1, min(num_rows, want_rows)), min(vocab_size, want_columns)
    while rows * columns * place_bytes > budget_bytes:
        if columns > small_columns and (columns >= rows or rows <= small_rows):
            columns = max(small_columns, columns // 2)
        else:
            rows = max(small_rows, rows // 2)
    left_bytes = budget_bytes - rows * columns * place_bytes
    kept_bytes = rows * columns * (EXPONENTIAL_BYTES if half else LOGIT_BYTES)
    num_tiles = -(-num_rows // rows) * -(-vocab_size // columns)
    return Tiling(rows, columns, min(num_tiles, left_bytes // kept_bytes) if tracked else 0)


def _gpu_columns(num_rows: int) -> int:
    """Return the width of tiles: with fewer rows they are wider, so that a tile has as many logits."""
    columns = GPU_COLUMNS
    while columns < MOST_GPU_COLUMNS and 2 * columns * num_rows <= GPU_ROWS * GPU_COLUMNS:
        columns *= 2
    return columns


def _gpu_budget(device: torch.device) -> int:
    """Return the default budget on a GPU. Memory that torch holds but does not use counts as free. Does not wait for
    the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total // 10, (free + unused) // 2)
