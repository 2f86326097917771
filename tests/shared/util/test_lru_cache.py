"""What is kept of images, decoded or as they are sent: the most recently used, within a bound of memory."""

from __future__ import annotations

import random

import pytest

from shared.util.lru_cache import LruCache


def test_the_least_recently_used_values_are_forgotten_beyond_the_limit():
    kept: LruCache[str, bytes] = LruCache(10, lambda key, value: len(value))
    made = []

    def get(key: str, size: int) -> None:
        def make() -> bytes:
            made.append(key)
            return bytes(size)

        assert len(kept.get(key, make)) == size

    for key, size in [("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4)]:
        get(key, size)
    assert made == ["a", "b", "c", "b"]  # "a" was used again before "c" came
    get("large", 11)
    get("a", 4)
    get("large", 11)
    assert made == ["a", "b", "c", "b", "large", "large"]  # it took nothing's place


def test_a_value_that_cannot_be_made_leaves_no_trace():
    kept: LruCache[str, int] = LruCache(10, lambda key, value: 1)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda: 1 // 0)
    assert kept.get("a", lambda: 7) == 7


def test_any_use_stays_within_the_limit_and_gives_what_was_made_last():
    chance = random.Random(0)
    alive: dict[int, bytes] = {}
    kept: LruCache[int, bytes] = LruCache(1000, lambda key, value: len(value))
    for _ in range(2000):
        key = chance.randrange(30)
        fresh = bytes(chance.randrange(200))
        found = kept.get(key, lambda fresh=fresh: fresh)
        assert found is fresh or found is alive[key]
        alive[key] = found
    sizes = [len(value) for key in range(30) if (value := kept.find(key)) is not None]
    assert 800 < sum(sizes) <= 1000  # no value has 200 bytes: another one would have found room
