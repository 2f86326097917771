"""Transfer of records of tensors from the host to a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")
HOST_ONLY = {"stays": True}
"""Metadata of the field of a tensor that stays on the host."""


def pinned(record: Record) -> Record:
    """Return the record with all its tensors in pinned memory, from which a GPU copies without the host. Needs a
    GPU."""
    return _changed(record, _once(Tensor.pin_memory), all_fields=True)


def on(record: Record, device: torch.device) -> Record:
    """Return the record with its tensors on `device`, except those that stay on the host. Copies from pinned memory are
    asynchronous."""
    return _changed(record, _once(lambda tensor: tensor.to(device, non_blocking=True)), all_fields=False)


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `change` with a memory, so that a tensor that occurs several times in a record is changed once."""
    changed: dict[int, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        return changed[id(tensor)] if id(tensor) in changed else changed.setdefault(id(tensor), change(tensor))

    return of


def _changed(record: Any, change: Callable[[Tensor], Tensor], *, all_fields: bool) -> Any:
    changed: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if all_fields or not each.metadata.get("stays"):
            new = _value(value, change, all_fields)
            if new is not value:
                changed[each.name] = new
    return replace(record, **changed) if changed else record


def _value(value: Any, change: Callable[[Tensor], Tensor], all_fields: bool) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _changed(value, change, all_fields=all_fields)
    if isinstance(value, tuple) and any(isinstance(item, Tensor) or is_dataclass(item) for item in value):
        return tuple(_value(item, change, all_fields) for item in value)
    return value
