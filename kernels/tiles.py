"""How the [rows x vocabulary] plane of logits is cut into tiles, and how many of them a byte budget keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_TILE = (128, 1024)  # rows, columns; fewer where there are fewer
CPU_TILE = (1024, 2048)  # 8 MiB of float32: within a last-level cache
GPU_TILE = (16384, 8192)  # 512 MiB of float32: every product fills the device
CPU_BUDGET_BYTES = 64 << 20
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of `num_rows` x `num_columns` float32 logits; at most `max_live` of them exist at a time."""

    num_rows: int
    num_columns: int
    max_live: int


def plan(num_rows: int, vocab_size: int, budget_bytes: int | None, device: torch.device) -> Tiling:
    """The largest tile, up to the device's own size, that the budget allows.

    The default budget is 64 MiB on a CPU, a tenth of the memory of a GPU. ValueError where the budget does not hold
    the smallest tile.
    """
    on_gpu = device.type == "cuda"
    if budget_bytes is None:
        budget_bytes = torch.cuda.get_device_properties(device).total_memory // 10 if on_gpu else CPU_BUDGET_BYTES
    small_rows, small_columns = min(num_rows, SMALLEST_TILE[0]), min(vocab_size, SMALLEST_TILE[1])
    least = small_rows * small_columns * LOGIT_BYTES
    if budget_bytes < least:
        raise ValueError(
            f"budget_bytes={budget_bytes} is too small for one tile of {small_rows} x {small_columns} logits: "
            f"give at least {least}"
        )
    want_rows, want_columns = GPU_TILE if on_gpu else CPU_TILE
    rows, columns = max(1, min(num_rows, want_rows)), min(vocab_size, want_columns)
    while rows * columns * LOGIT_BYTES > budget_bytes:
        if columns > small_columns and (columns >= rows or rows <= small_rows):
            columns = max(small_columns, columns // 2)
        else:
            rows = max(small_rows, rows // 2)
    return Tiling(rows, columns, budget_bytes // (rows * columns * LOGIT_BYTES))
