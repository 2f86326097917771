"""Detection of equal rows of bytes, in C, so that a function of single rows is computed once for all equal ones.

Drawn boards, pages and diagrams consist of few different patches; photographs do not.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import library

MIN_ROWS = 64  # with fewer rows, products take no noticeable time


def distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Find the distinct rows of uint8 [N, W] on a CPU: return int64 [U], the index of each one's first occurrence, and
    int64 [N], for each row its index among the distinct ones.

    Return None if more than half of the rows are distinct, for few rows, on other devices, and without a C compiler.
    """
    total, count = len(rows), ctypes.c_int64()
    plain = type(rows) is Tensor and rows.device.type == "cpu" and rows.dtype == torch.uint8 and rows.numel() > 0
    functions = library() if plain and total >= MIN_ROWS else None  # built only if it is needed
    if functions is None:
        return None
    rows, most = rows.contiguous(), total // 2
    table = torch.full((1 << (2 * most).bit_length(),), -1)
    first, like = torch.empty(most, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
    room = table.data_ptr(), len(table), first.data_ptr(), like.data_ptr(), ctypes.byref(count)
    functions.distinct_rows(rows.data_ptr(), *rows.shape, most, *room)
    return None if count.value < 0 else (first[: count.value], like)
