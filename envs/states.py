"""Keys of an environment's states, by which the learner finds the turns that were played in the same state."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

import numpy as np

from shared.util.user_errors import in_words

KEY_BYTES = 8
PREFIX = "state:"
_KEY = re.compile(f"{PREFIX}[0-9a-f]{{{2 * KEY_BYTES}}}")
FORMS = "text, numbers, bytes, arrays, or tuples, lists, sets, dicts and dataclasses of these"


def state_key(state: Any) -> str:
    """Return the key of a state, which is the same in every process: equal states have equal keys.

    A tuple and a list of the same parts are equal, and so are a number of NumPy's and Python's. None is no state: its
    key is "". A key is its own key: an environment in another process has made it already. Raise TypeError for an
    object that has no value of its own.
    """
    if state is None or (isinstance(state, str) and (not state or _KEY.fullmatch(state))):
        return state or ""
    return PREFIX + _digest(state).hex()


def _digest(value: Any) -> bytes:
    """Return a digest of a value, by its kind and its parts."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | str | bytes | bytearray | None):
        return _of_parts(_kind(value), [_plain(value)])
    if isinstance(value, Enum):
        return _of_parts("enum", [type(value).__name__.encode(), value.name.encode()])
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufSU":
        form = repr((value.dtype.str, value.shape))
        return _of_parts("array", [form.encode(), np.ascontiguousarray(value).tobytes()])
    if isinstance(value, tuple | list):
        return _of_parts("sequence", map(_digest, value))
    if isinstance(value, set | frozenset):
        return _of_parts("set", sorted(map(_digest, value)))
    if isinstance(value, dict):
        return _of_parts("dict", sorted(_digest(key) + _digest(part) for key, part in value.items()))
    if is_dataclass(value) and not isinstance(value, type):
        own = [_digest(getattr(value, field.name)) for field in fields(value)]
        return _of_parts("dataclass", [type(value).__name__.encode(), *own])
    raise TypeError(f"info['state'] is or holds {in_words(value, 100)}, a {type(value).__name__}; it may be {FORMS}")


def _kind(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return "number"
    return "bytes" if isinstance(value, bytes | bytearray) else type(value).__name__


def _plain(value: Any) -> bytes:
    if isinstance(value, bool | int):
        return str(int(value)).encode()
    if isinstance(value, float):
        return str(int(value)).encode() if value.is_integer() else value.hex().encode()
    return bytes(value) if isinstance(value, bytes | bytearray) else str(value).encode(errors="surrogatepass")


def _of_parts(kind: str, parts: Iterable[bytes]) -> bytes:
    """Return a digest of parts, which says where each of them ends."""
    digest = blake2b(kind.encode(), digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
