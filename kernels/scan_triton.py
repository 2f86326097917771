"""`kernels.reverse_scan` as one Triton launch: one program per stream goes back in time, one block of steps at once."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _then(decay_a, acc_a, decay_b, acc_b):
    """Combine a (later in time) with b: acc = acc_b + decay_b * (acc_a + decay_a * the value after a)."""
    return decay_a * decay_b, acc_b + decay_b * acc_a


@triton.jit
def _reverse_scan(decay_ptr, delta_ptr, out_ptr, num_steps, stride, BLOCK: tl.constexpr):
    stream = tl.program_id(0).to(tl.int64)
    carry = tl.zeros((), tl.float64)
    for start in range(0, num_steps, BLOCK):
        back = start + tl.arange(0, BLOCK)  # number of steps from the end
        at = stream + (num_steps - 1 - back).to(tl.int64) * stride
        inside = back < num_steps
        decay = tl.load(decay_ptr + at, mask=inside, other=1.0).to(tl.float64)
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float64)
        product, acc = tl.associative_scan((decay, delta), 0, _then)
        acc += product * carry
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
        carry = tl.sum(tl.where(back == start + BLOCK - 1, acc, 0.0), axis=0)


def reverse_scan(decay_TB: Tensor, delta_TB: Tensor, block: int = 1024) -> Tensor:
    """Compute `kernels.reverse_scan` for checked arguments; delta is not empty."""
    decay_TB, delta_TB = decay_TB.contiguous(), delta_TB.contiguous()
    num_steps, width = delta_TB.shape
    out_TB = torch.empty_like(delta_TB)
    with torch.cuda.device_of(delta_TB):
        block = min(block, max(16, triton.next_power_of_2(num_steps)))
        _reverse_scan[(width,)](decay_TB, delta_TB, out_TB, num_steps, width, BLOCK=block)
    return out_TB
