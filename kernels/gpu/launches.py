"""The tensors that this folder's kernels support, and the kernels' compilation."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import os

import torch
import triton
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 1 << 14  # a row must fit into one program's registers
# Each program has its own sum of the weight's gradient; 4 programs for each multiprocessor of a Hopper GPU.
MAX_PROGRAMS = 528


def is_supported(*tensors: Tensor) -> bool:
    """Tell whether all are plain tensors of one floating dtype on a GPU (with Triton's interpreter: on any device)."""
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    there = os.environ.get("TRITON_INTERPRET") == "1" or all(tensor.is_cuda for tensor in tensors)
    return plain and there and len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].dtype in DTYPES


def jit(*counts: str):
    """Return a decorator that compiles a kernel without specialising it on these numbers, which differ between
    calls."""
    return lambda function: triton.jit(function, do_not_specialize=list(counts))
