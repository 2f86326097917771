"""What the kernels of this folder take, and how they are compiled."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import os

import torch
import triton
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 1 << 14  # a row lies in one program's registers
MAX_PROGRAMS = 528  # each has a sum of its own of the weight's gradient; 4 for each of a Hopper GPU's multiprocessors


def takes(*tensors: Tensor) -> bool:
    """Whether all are plain tensors of one floating dtype on a GPU (or anywhere, in Triton's interpreter)."""
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    there = os.environ.get("TRITON_INTERPRET") == "1" or all(tensor.is_cuda for tensor in tensors)
    return plain and there and len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].dtype in DTYPES


def jit(*counts: str):
    """Compiled for none of these numbers, which differ from call to call."""
    return lambda function: triton.jit(function, do_not_specialize=list(counts))
