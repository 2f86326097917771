"""The linear recurrence that runs backward in time through episodes: V-trace, GAE and discounted returns are one.

Suffixes: T time, B episodes side by side, N tokens of a packed stream, L steps of a block, K blocks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32  # steps
NARROW = 16  # fewer episodes than this side by side: blocks are transposed first

Doubles = NDArray[np.float64]


def reverse_scan(
    decay: Tensor, delta: Tensor, *, lengths: Sequence[int] | None = None, initial: Tensor | None = None
) -> Tensor:
    """`acc_t = delta_t + decay_t * acc_{t+1}`, computed in float64 and returned in delta's dtype; no gradient.

    Two forms. Time-major: decay and delta [T, B], acc_T = initial [B] (or 0). Packed: decay and delta [N] hold
    episodes one after the other; `lengths` (their sum is N) says where they end and initial [len(lengths)] is what
    follows each of them; without lengths an episode ends where decay is 0, and initial is [] or None.
    Decays may be anything finite, 0 and 1 included: nothing is divided by them.
    ValueError: shapes, dtypes or devices that do not fit, lengths that do not add up to N.
    """
    _check(decay, delta, lengths, initial)
    decay, delta = decay.detach(), delta.detach()
    if delta.numel() == 0:
        return delta.clone()
    if delta.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        from kernels import scan_triton

        return scan_triton.reverse_scan(decay, delta, lengths, initial)
    decays, accs = decay.double().contiguous().numpy(), delta.to(torch.float64, copy=True).contiguous().numpy()
    carry = None if initial is None else initial.detach().double().numpy()
    if lengths is not None:
        decays, carry = _cut(decays, accs, lengths, carry), None
    if delta.ndim == 1:
        decays, accs = decays[:, None], accs[:, None]
    _scan(decays, accs, np.zeros(accs.shape[1]) if carry is None else carry)
    return torch.from_numpy(accs).view(delta.shape).to(delta.dtype)


def _cut(decay_N: Doubles, delta_N: Doubles, lengths: Sequence[int], initial: Doubles | None) -> Doubles:
    """The decays with a 0 at each episode's end; what follows an episode goes into its last delta."""
    num_steps = np.asarray(lengths)
    ends = num_steps.cumsum()[num_steps > 0] - 1
    if initial is not None:
        delta_N[ends] += decay_N[ends] * initial[num_steps > 0]
    decay_N = decay_N.copy()
    decay_N[ends] = 0
    return decay_N


def _check(decay: Tensor, delta: Tensor, lengths: Sequence[int] | None, initial: Tensor | None) -> None:
    if decay.shape != delta.shape or delta.ndim not in (1, 2):
        raise ValueError(f"decay {list(decay.shape)} and delta {list(delta.shape)} must both be [T, B] or both [N]")
    if not (decay.is_floating_point() and delta.is_floating_point()):
        raise ValueError(f"decay is {decay.dtype} and delta {delta.dtype}: give floating-point tensors")
    if decay.device != delta.device or (initial is not None and initial.device != delta.device):
        raise ValueError(f"decay is on {decay.device} and delta on {delta.device}: put them and initial on one device")
    if lengths is not None and delta.ndim == 2:
        raise ValueError("lengths belong to the packed form [N]; delta is [T, B]")
    if lengths is not None and (sum(lengths) != len(delta) or min(lengths, default=0) < 0):
        raise ValueError(f"lengths add up to {sum(lengths)}, none may be negative: delta has {len(delta)} steps")
    wanted = [delta.shape[1]] if delta.ndim == 2 else [] if lengths is None else [len(lengths)]
    if initial is not None and list(initial.shape) != wanted:
        raise ValueError(f"initial has shape {list(initial.shape)}: give {wanted}, what follows each episode")


def _scan(decay_TB: Doubles, acc_TB: Doubles, carry_B: Doubles) -> None:
    """Overwrite the deltas in `acc` by the recurrence, `carry` being what follows them.

    Blocks of steps run side by side as one vector: first each alone, to learn how it maps what follows it to its
    first step; these maps are a recurrence over the blocks; then each again, from what truly follows it. The second
    pass computes every step as the definition does, so that a decay of 0 or 1 is exact.
    """
    num_steps, width = acc_TB.shape
    if num_steps <= 2 * BLOCK:
        _loop(decay_TB, acc_TB, carry_B)
        return
    head = num_steps % BLOCK
    shape = (num_steps // BLOCK, BLOCK, width)
    decay_KLB, acc_KLB = decay_TB[head:].reshape(shape), acc_TB[head:].reshape(shape)
    narrow = width < NARROW
    if narrow:  # steps of neighbouring blocks side by side in memory
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
    """The definition, one vector per step of the first axis."""
    carry = carry.copy()
    for step in range(len(acc) - 1, -1, -1):
        carry *= decay[step]
        carry += acc[step]
        acc[step] = carry
