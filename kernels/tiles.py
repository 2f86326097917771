"""How the [rows x vocabulary] plane of logits is cut into tiles, and how many of them a byte budget keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_TILE = (128, 1024)  # rows, columns; fewer where there are fewer
CPU_TILE = (1024, 2048)  # 8 MiB of float32: within a last-level cache
GPU_ROWS = 16384
GPU_COLUMNS = 33 * 256  # 132 processors compute blocks of 128 x 256: this width is whole waves of 16,384 rows
MOST_GPU_COLUMNS = 4 * GPU_COLUMNS  # of a quarter as many rows or fewer, whose waves are whole too
CPU_BUDGET_BYTES = 64 << 20
LOGIT_BYTES, EXPONENTIAL_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of `num_rows` x `num_columns`, the first `num_kept` of which the backward finds again."""

    num_rows: int
    num_columns: int
    num_kept: int


def plan(
    num_rows: int, vocab_size: int, budget_bytes: int | None, device: torch.device, *, half: bool, tracked: bool
) -> Tiling:
    """The largest tile, up to the device's own size, that the budget allows, and as many kept ones as it holds then.

    `half`: gradients of logits are half as wide as logits, and kept tiles too. `tracked`: there will be a backward.
    The default budget is 64 MiB on a CPU; on a GPU a tenth of its memory, or half of what is free if that is less.
    ValueError where the budget does not hold the smallest tile.
    """
    on_gpu = device.type == "cuda"
    small_rows, small_columns = min(num_rows, SMALLEST_TILE[0]), min(vocab_size, SMALLEST_TILE[1])
    place_bytes = LOGIT_BYTES + (EXPONENTIAL_BYTES if half and tracked else 0)  # logits, and apart their gradient
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
    """Wider tiles of fewer rows, so that a tile stays as large."""
    columns = GPU_COLUMNS
    while columns < MOST_GPU_COLUMNS and 2 * columns * num_rows <= GPU_ROWS * GPU_COLUMNS:
        columns *= 2
    return columns


def _gpu_budget(device: torch.device) -> int:
    """What torch holds without using it is free too. Nothing here waits for the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total // 10, (free + unused) // 2)
