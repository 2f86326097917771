"""A cache of the values used last, within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Values by key, `max_bytes` of them at most: the least recently used are dropped first, and a value larger than
    that is never cached. `size_of` returns the size of an entry in bytes. Not thread-safe."""

    def __init__(self, max_bytes: int, size_of: Callable[[Key, Value], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._bytes = 0

    def find(self, key: Key) -> Value | None:
        """Return the value of `key` if it is cached; None otherwise."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of `key`; if it is not cached, call `make` and cache the result. Nothing is cached if `make`
        raises."""
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
        """Forget the value of `key`."""
        if key in self._values:
            self._bytes -= self._size_of(key, self._values.pop(key))
