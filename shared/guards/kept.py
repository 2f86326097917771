"""What was made once and may be wanted again, within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """Values by key, `max_bytes` of them at most: the least recently used are forgotten first, and one that is larger
    by itself is never kept. `size_of` gives the bytes that an entry takes. Not thread-safe."""

    def __init__(self, max_bytes: int, size_of: Callable[[Key, Value], int]) -> None:
        self._max_bytes, self._size_of = max_bytes, size_of
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._bytes = 0

    def find(self, key: Key) -> Value | None:
        """The value of `key` if it is kept."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of `key`, made now unless it is kept. Nothing is kept where `make` raises."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        size = self._size_of(key, value)
        if size <= self._max_bytes:
            self._values[key] = value
            self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._size_of(*self._values.popitem(last=False))
        return value

    def drop(self, key: Key) -> None:
        """The value of `key` is not kept any more."""
        if key in self._values:
            self._bytes -= self._size_of(key, self._values.pop(key))
