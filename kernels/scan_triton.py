"""`kernels.reverse_scan` as one Triton launch: a program per episode walks back in time, a block of steps at once."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _then(decay_a, acc_a, decay_b, acc_b):
    """First a (later in time), then b: acc = acc_b + decay_b * (acc_a + decay_a * what follows)."""
    return decay_a * decay_b, acc_b + decay_b * acc_a


@triton.jit
def _reverse_scan(
    decay_ptr, delta_ptr, out_ptr, initial_ptr, bounds_ptr, num_steps, stride,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    episode = tl.program_id(0).to(tl.int64)
    first = episode
    length = num_steps
    if PACKED:
        first = tl.load(bounds_ptr + episode)
        length = (tl.load(bounds_ptr + episode + 1) - first).to(tl.int32)
    carry = tl.zeros((), tl.float64)
    if HAS_INITIAL:
        carry = tl.load(initial_ptr + episode).to(tl.float64)
    for start in range(0, length, BLOCK):
        back = start + tl.arange(0, BLOCK)  # steps from the end
        at = first + (length - 1 - back).to(tl.int64) * stride
        inside = back < length
        decay = tl.load(decay_ptr + at, mask=inside, other=1.0).to(tl.float64)
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float64)
        product, acc = tl.associative_scan((decay, delta), 0, _then)
        acc += product * carry
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
        carry = tl.sum(tl.where(back == start + BLOCK - 1, acc, 0.0), axis=0)


def reverse_scan(
    decay: Tensor, delta: Tensor, lengths: Sequence[int] | None, initial: Tensor | None, block: int = 1024
) -> Tensor:
    """As `kernels.reverse_scan`, whose checks have passed; delta is not empty."""
    decay, delta = decay.contiguous(), delta.contiguous()
    out = torch.empty_like(delta)
    initial = None if initial is None else initial.reshape(-1).contiguous()
    bounds, programs = None, 1 if delta.ndim == 1 else delta.shape[1]
    if lengths is not None:
        host = torch.tensor([0, *accumulate(lengths)])
        bounds = host.pin_memory().to(delta.device, non_blocking=True) if delta.is_cuda else host
        programs = len(lengths)
    stride = 1 if delta.ndim == 1 else delta.shape[1]
    with torch.cuda.device_of(delta):
        _reverse_scan[(programs,)](
            decay, delta, out, initial, bounds, delta.shape[0], stride,
            HAS_INITIAL=initial is not None, PACKED=bounds is not None,
            BLOCK=min(block, max(16, triton.next_power_of_2(delta.shape[0]))),
        )  # fmt: skip
    return out
