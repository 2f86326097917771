"""Records of tensors that are made on the host and then go to a device, all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")
STAYS = {"stays": True}
"""Of the field of a tensor that stays on the host."""


def pinned(record: Record) -> Record:
    """All its tensors in memory from which a GPU copies by itself. Needs a GPU."""
    return _changed(record, _once(Tensor.pin_memory), all_fields=True)


def on(record: Record, device: torch.device) -> Record:
    """Its tensors on `device`, but for those that stay on the host; from pinned memory nothing waits for the copies."""
    return _changed(record, _once(lambda tensor: tensor.to(device, non_blocking=True)), all_fields=False)


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A tensor that is in several places of a record stays one."""
    changed: dict[int, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        return changed[id(tensor)] if id(tensor) in changed else changed.setdefault(id(tensor), change(tensor))

    return of


def _changed(record: Any, change: Callable[[Tensor], Tensor], *, all_fields: bool) -> Any:
    found: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if all_fields or not each.metadata.get("stays"):
            new = _value(value, change, all_fields)
            if new is not value:
                found[each.name] = new
    return replace(record, **found) if found else record


def _value(value: Any, change: Callable[[Tensor], Tensor], all_fields: bool) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _changed(value, change, all_fields=all_fields)
    if isinstance(value, tuple) and any(is_dataclass(item) for item in value):
        return tuple(_value(item, change, all_fields) for item in value)
    return value
