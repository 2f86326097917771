"""JSON of bounded length for any value from user code."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import msgspec
import numpy as np

DEPTH = 6
MARK = "…"  # marks what was left out


def bounded_json(value: Any, max_characters: int) -> str:
    """Return `value` as JSON of at most `max_characters`. Long texts, lists and maps are cut as far as needed, and a
    value without a form in JSON becomes the name of its type. Never raises."""
    items = max_characters
    while items > 1:
        try:
            text = msgspec.json.encode(_Plain(items, max_characters).of(value, DEPTH)).decode()
        except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is read
            text = msgspec.json.encode(f"{MARK} cannot be told: {type(error).__name__}").decode()
        if len(text) <= max_characters:
            return text
        items //= 4
    return "" if max_characters < 3 else f'"{MARK}"'


class _Plain:
    """Converts values to JSON's types: each text and container is cut to its first `items`, and at most `values` values
    are converted in all."""

    def __init__(self, items: int, values: int) -> None:
        self._items = items
        self._room = values

    def of(self, value: Any, depth: int) -> Any:
        self._room -= 1
        if self._room < 0:
            return MARK
        match value:
            case None | bool():
                return value
            case np.bool_():
                return bool(value)
            case int() | np.integer():
                return int(value) if abs(int(value)) < 2**63 else f"{MARK} large integer"
            case float() | np.floating():
                return float(value) if math.isfinite(value) else str(float(value))
            case str():
                return value if len(value) <= self._items else value[: self._items] + MARK
            case dict() | list() | tuple():
                return self._container(value, depth - 1) if depth else MARK
            case np.ndarray():
                return f"{MARK} array of {value.dtype}{list(value.shape)}"
            case _:
                return f"{MARK} {type(value).__name__}"

    def _container(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...], depth: int) -> Any:
        count = min(len(value), self._items, max(self._room, 0))
        left_out = len(value) - count
        if isinstance(value, dict):
            pairs = islice(value.items(), count)
            cut = {str(key)[: self._items]: self.of(each, depth) for key, each in pairs}
            return cut | {MARK: left_out} if left_out else cut
        first = [self.of(each, depth) for each in value[:count]]
        return [*first, f"{MARK} {left_out} more"] if left_out else first
