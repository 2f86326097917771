"""What `linear_logprob` refuses, before any launch: one line that names what and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_shapes(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float | Tensor,
    mask_N: Tensor | None,
    needs_grad_N: Tensor | None,
) -> None:
    """ValueError where shapes, dtypes or devices do not fit each other."""
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden {list(hidden_NH.shape)} and weight {list(weight_VH.shape)} must be [N, H] and [V, H] of one H"
        )
    if 0 in weight_VH.shape:
        raise ValueError(f"weight {list(weight_VH.shape)} is empty: give [V, H] of at least one token")
    if hidden_NH.dtype not in DTYPES or hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden is {hidden_NH.dtype} and weight {weight_VH.dtype}: both must be one of float32, bfloat16, float16"
        )
    if hidden_NH.device != weight_VH.device:
        raise ValueError(f"hidden is on {hidden_NH.device} and weight on {weight_VH.device}: put both on one device")
    if target_N.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target is {target_N.dtype}: give int64 or int32 token ids")
    named = {"target": target_N, "mask": mask_N, "needs_grad": needs_grad_N}
    if isinstance(temperature, Tensor):
        named["temperature"] = temperature
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.shape != hidden_NH.shape[:1] and not (name == "temperature" and tensor.ndim == 0):
            raise ValueError(f"{name} has shape {list(tensor.shape)}: give one per row of hidden, [{len(hidden_NH)}]")
        if tensor.device not in (hidden_NH.device, torch.device("cpu")):
            raise ValueError(f"{name} is on {tensor.device}: put it on {hidden_NH.device} or on the CPU")
        if name in ("mask", "needs_grad") and tensor.dtype != torch.bool:
            raise ValueError(f"{name} is {tensor.dtype}: give a bool tensor")


def check_values(
    vocab_size: int,
    target_N: Tensor,
    temperature: float | Tensor,
    banned_ids: Sequence[int] | Tensor | None,
    mask_N: Tensor | None,
) -> frozenset[int]:
    """The banned ids; ValueError for a target, temperature or ban that no policy can have sampled with."""
    listed = banned_ids.tolist() if isinstance(banned_ids, Tensor) else banned_ids
    banned = frozenset(int(i) for i in listed or ())
    for token in banned:
        if not 0 <= token < vocab_size:
            raise ValueError(f"banned id {token} is outside the vocabulary of {vocab_size}")
    if len(banned) == vocab_size:
        raise ValueError(f"all {vocab_size} tokens of the vocabulary are banned: leave at least one")
    if not isinstance(temperature, Tensor) and not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}: give a finite number above 0")
    used_N = torch.ones_like(target_N, dtype=torch.bool) if mask_N is None else mask_N.to(target_N.device)
    outside_N = (target_N < 0) | (target_N >= vocab_size)
    for token in banned:
        outside_N |= target_N == token
    row = _first(outside_N & used_N)
    if row is not None:
        token = int(target_N[row])
        if token in banned:
            raise ValueError(f"target {token} of row {row} is banned: a policy under this ban cannot have sampled it")
        raise ValueError(f"target {token} of row {row} is outside the vocabulary of {vocab_size}")
    if isinstance(temperature, Tensor):
        wrong = ~(torch.isfinite(temperature) & (temperature > 0)).expand(target_N.shape)
        row = _first(wrong & used_N.to(wrong.device))
        if row is not None:
            value = float(temperature.expand(target_N.shape)[row])
            raise ValueError(f"temperature of row {row} is {value}: give a finite number above 0")
    return banned


def _first(wrong_N: Tensor) -> int | None:
    index = wrong_N.nonzero()
    return int(index[0]) if len(index) else None
