"""Rows of bytes that come several times, found in C: what is computed of each row alone is computed once for all that
are alike. Drawn boards, pages and diagrams are made of few different patches; photographs are not."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import library

MIN_ROWS = 64  # of fewer, products take no time


def distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of uint8 [N, W] on a CPU: int64 [U], where each different row is first met, and int64 [N], which of those each
    row equals. None where more than half are different, or nobody looks: on other devices, without a C compiler, and of
    few rows."""
    total, count = len(rows), ctypes.c_int64()
    plain = type(rows) is Tensor and rows.device.type == "cpu" and rows.dtype == torch.uint8 and rows.numel() > 0
    found = library() if plain and total >= MIN_ROWS else None  # which nobody builds who does not need it
    if found is None:
        return None
    rows, most = rows.contiguous(), total // 2
    table = torch.full((1 << (2 * most).bit_length(),), -1)
    first, like = torch.empty(most, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
    room = table.data_ptr(), len(table), first.data_ptr(), like.data_ptr(), ctypes.byref(count)
    found.distinct_rows(rows.data_ptr(), *rows.shape, most, *room)
    return None if count.value < 0 else (first[: count.value], like)
