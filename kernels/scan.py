"""The linear recurrence backward in time through episodes, of which V-trace, GAE and discounted returns are cases.

Suffixes: T time, B parallel streams, L steps of a block, K blocks.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32  # steps
NARROW = 16  # with fewer parallel streams, blocks are transposed first

Doubles = NDArray[np.float64]


def reverse_scan(decay_TB: Tensor, delta_TB: Tensor) -> Tensor:
    """Compute `acc_t = delta_t + decay_t * acc_{t+1}`, acc_T = 0, in float64; return it in delta's dtype, without
    gradient.

    Decays may be any finite numbers, including 0 (an episode's end) and 1: nothing is divided by them. Raise ValueError
    if shapes, dtypes or devices do not match.
    """
    if decay_TB.shape != delta_TB.shape or delta_TB.ndim != 2:
        raise ValueError(f"decay {list(decay_TB.shape)} and delta {list(delta_TB.shape)} must both be [T, B]")
    if not (decay_TB.is_floating_point() and delta_TB.is_floating_point()):
        raise ValueError(f"decay is {decay_TB.dtype} and delta {delta_TB.dtype}: give floating-point tensors")
    if decay_TB.device != delta_TB.device:
        raise ValueError(f"decay is on {decay_TB.device} and delta on {delta_TB.device}: put both on one device")
    decay_TB, delta_TB = decay_TB.detach(), delta_TB.detach()
    if delta_TB.numel() == 0:
        return delta_TB.clone()
    if delta_TB.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        from kernels import scan_triton

        return scan_triton.reverse_scan(decay_TB, delta_TB)
    decays, accs = decay_TB.double().contiguous().numpy(), delta_TB.to(torch.float64, copy=True).contiguous().numpy()
    _scan(decays, accs, np.zeros(accs.shape[1]))
    return torch.from_numpy(accs).to(delta_TB.dtype)


def _scan(decay_TB: Doubles, acc_TB: Doubles, carry_B: Doubles) -> None:
    """Overwrite the deltas in `acc` with the results of the recurrence; `carry` is the value after the last step.

    Blocks of steps run in parallel as one vector. The first pass computes, for each block alone, the linear map from
    the value after it to its first step. These maps form a recurrence over the blocks, which gives the value after each
    block. The second pass starts each block from that value. It computes every step as the definition does, so that
    decays of 0 or 1 are exact.
    """
    num_steps, width = acc_TB.shape
    if num_steps <= 2 * BLOCK:
        _loop(decay_TB, acc_TB, carry_B)
        return
    head = num_steps % BLOCK
    shape = (num_steps // BLOCK, BLOCK, width)
    decay_KLB, acc_KLB = decay_TB[head:].reshape(shape), acc_TB[head:].reshape(shape)
    narrow = width < NARROW
    if narrow:  # puts the steps of neighbouring blocks next to each other in memory
        decay_KLB = np.ascontiguousarray(decay_KLB.swapaxes(0, 1)).swapaxes(0, 1)
        acc_KLB = np.ascontiguousarray(acc_KLB.swapaxes(0, 1)).swapaxes(0, 1)
    product_KB, first_KB = decay_KLB[:, -1].copy(), acc_KLB[:, -1].copy()
    for step in range(BLOCK - 2, -1, -1):
        first_KB *= decay_KLB[:, step]
        first_KB += acc_KLB[:, step]
        product_KB *= decay_KLB[:, step]
    _scan(product_KB, first_KB, carry_B)
    follows_KB = np.concatenate([first_KB[1:], carry_B[None]])
    _loop(decay_KLB.swapaxes(0, 1), acc_KLB.swapaxes(0, 1), follows_KB)
    if narrow:
        acc_TB[head:] = acc_KLB.reshape(-1, width)
    _loop(decay_TB[:head], acc_TB[:head], first_KB[0])


def _loop(decay: Doubles, acc: Doubles, carry: Doubles) -> None:
    """Compute the recurrence by its definition, one vector for each step of the first axis."""
    carry = carry.copy()
    for step in range(len(acc) - 1, -1, -1):
        carry *= decay[step]
        carry += acc[step]
        acc[step] = carry
