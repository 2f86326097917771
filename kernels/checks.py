"""Checks of the arguments of `linear_logprob`, before any launch: each error is one line that names the value and the
reason."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def check_shapes(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> None:
    """Raise ValueError if shapes, dtypes or devices do not match."""
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden {list(hidden_NH.shape)} and weight {list(weight_VH.shape)} must be [N, H] and [V, H] of one H"
        )
    if 0 in weight_VH.shape:
        raise ValueError(f"weight {list(weight_VH.shape)} is empty: give [V, H] of at least one token")
    if hidden_NH.dtype not in DTYPES or hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden is {hidden_NH.dtype} and weight {weight_VH.dtype}: both must be one of float32, bfloat16"
        )
    if hidden_NH.device != weight_VH.device:
        raise ValueError(f"hidden is on {hidden_NH.device} and weight on {weight_VH.device}: put both on one device")
    if target_N.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target is {target_N.dtype}: give int64 or int32 token ids")
    if target_N.shape != hidden_NH.shape[:1]:
        raise ValueError(f"target has shape {list(target_N.shape)}: give one per row of hidden, [{len(hidden_NH)}]")
    if target_N.device not in (hidden_NH.device, torch.device("cpu")):
        raise ValueError(f"target is on {target_N.device}: put it on {hidden_NH.device} or on the CPU")


def check_values(vocab_size: int, target_N: Tensor, temperature: float, banned_ids: Iterable[int]) -> tuple[int, ...]:
    """Return the banned ids, sorted. Raise ValueError for a target, temperature or ban under which no policy can have
    sampled."""
    banned = sorted(set(banned_ids))
    for token in banned:
        if not 0 <= token < vocab_size:
            raise ValueError(f"banned id {token} is outside the vocabulary of {vocab_size}")
    if len(banned) == vocab_size:
        raise ValueError(f"all {vocab_size} tokens of the vocabulary are banned: leave at least one")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}: give a finite number above 0")
    wrong_N = (target_N < 0) | (target_N >= vocab_size)
    for token in banned:
        wrong_N |= target_N == token
    wrong = wrong_N.nonzero()
    if len(wrong):
        row = int(wrong[0])
        token = int(target_N[row])
        if token in banned:
            raise ValueError(f"target {token} of row {row} is banned: a policy under this ban cannot have sampled it")
        raise ValueError(f"target {token} of row {row} is outside the vocabulary of {vocab_size}")
    return tuple(banned)
