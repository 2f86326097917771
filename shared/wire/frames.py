"""The frames of one message: writing and reading arrays and images, their limits, their digest, and WireError."""

from __future__ import annotations

import functools
import math
import struct
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.types import ITEMS, Image, Trajectory

Frame = bytes | memoryview
HASH_DIGITS = 32


@functools.cache
def dtype_of(hint: Any) -> np.dtype[Any]:
    """Return the dtype of an array type such as NDArray[np.int32]. From numpy 2.5 on NDArray is an alias of its own;
    msgspec passes the type that it stands for. Both forms are understood."""
    last = typing.get_args(hint)[-1]
    return np.dtype(*(typing.get_args(last) or [last]))


DTYPES: dict[str, np.dtype[Any]] = {  # a trajectory's arrays, by field
    name: dtype_of(hint)
    for name, hint in typing.get_type_hints(Trajectory).items()
    if typing.get_origin(hint) in (np.ndarray, NDArray)
}


class WireError(ValueError):
    """A message that breaks the contract. `reason` is a short fixed word for counters, `detail` is for people.

    `ticket_id` is the ticket of a group that could not be decoded; "" for other messages, and if it could not be read.
    """

    def __init__(self, reason: str, detail: str, ticket_id: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.ticket_id = ticket_id


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one message, beside the bounds of its fields (see `shared.types`). Sizes are in bytes. `items` limits
    the numbers, texts, lists and maps in the header, each of which takes up to 100 bytes of memory once decoded;
    `depth` limits the nesting of free-form fields."""

    message_bytes: int = 256 * 2**20
    header_bytes: int = 32 * 2**20
    frames: int = 2**16
    items: int = 2**19
    trajectory_tokens: int = 2**20
    depth: int = 16


DEFAULT_LIMITS = Limits()


def digest(frames: Sequence[Frame]) -> bytes:
    """Return the XXH3 (128 bits) of the frames and their lengths: it changes with every bit and every boundary between
    frames. It contains no secret: it detects damage, not forgery."""
    hasher = xxhash.xxh3_128(struct.pack(f"<{len(frames)}Q", *map(len, frames)))
    for frame in frames:
        hasher.update(frame)
    return hasher.digest()


def num_items(header: Frame, most: int) -> int:
    """Count the msgpack items in `header` at all depths; stop counting at `most` + 1. Bytes that are not msgpack give
    some count, without an error."""
    offset = 0
    count = 0
    size = len(header)
    while offset < size and count <= most:
        kind = header[offset]
        offset += _ITEM_BYTES[kind]
        if kind in _LENGTH_BYTES:
            offset += int.from_bytes(header[offset - _LENGTH_BYTES[kind] : offset], "big")
        count += 1
    return count


def _item_bytes(kind: int) -> int:
    """Return the size in bytes of a msgpack item whose first byte is `kind`. Not included are the items of a list or a
    map, and the content of a bin, ext or str whose length stands in the next bytes (the type byte of such an ext is
    part of this content)."""
    if 0xA0 <= kind < 0xC0:  # a short text
        return 1 + (kind & 0x1F)
    numbers = dict(zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True))
    fixed = dict(zip(range(0xD4, 0xD9), (2, 3, 5, 9, 17), strict=True)) | {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    return 1 + (numbers | fixed | _LENGTH_BYTES).get(kind, 0)


_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin, ext, str
_ITEM_BYTES = [_item_bytes(kind) for kind in range(256)]


def check_plain(value: Any, depth: int, where: str) -> None:
    """Raise WireError unless a free-form value consists of msgpack's own types within their bounds, nested at most
    `depth` levels deep."""
    if depth == 0:
        raise WireError("too_deep", f"{where} is nested too deeply")
    if isinstance(value, list | tuple | dict):
        if len(value) > ITEMS:
            raise WireError("too_many", f"{where} has {len(value)} items, limit {ITEMS}")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise WireError("wrong_type", f"{where} has a key that is {type(key).__name__}, expected str")
            check_plain(item, depth - 1, f"{where}[{key!r:.40}]")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError("out_of_range", f"{where} is an integer of more than 64 bits")
    elif isinstance(value, float | np.floating) and not math.isfinite(value):
        raise WireError("not_finite", f"{where} is {value}")
    elif not (value is None or isinstance(value, bool | int | float | str | np.integer | np.floating)):
        raise WireError("wrong_type", f"{where} is {type(value).__name__}, which cannot be sent")


class FrameWriter:
    """Collects the arrays of a message being written, and its images, each of them once."""

    def __init__(self) -> None:
        self.arrays: list[Frame] = []
        self.images: dict[str, Image] = {}  # by content hash
        self._rows: dict[str, int] = {}

    def write(self, value: Any) -> Any:
        """Return what represents, in the header, a value for which msgpack has no type."""
        if isinstance(value, np.ndarray):
            if value.ndim != 1:
                raise WireError("wrong_type", f"array of shape {list(value.shape)}, expected [T]")
            self.arrays.append(np.ascontiguousarray(value).data.cast("B") if len(value) else b"")
            return value.dtype.str
        if isinstance(value, np.generic):
            return value.item()
        if type(value) is not Image:
            raise WireError("wrong_type", f"{type(value).__name__} is nothing that can be sent")
        if len(value.content_hash) != HASH_DIGITS or not isinstance(value.data, bytes | memoryview):
            raise WireError("image_hash", "an image holds no bytes or no content hash; make it with Image.of")
        self.images.setdefault(value.content_hash, value)
        return self._rows.setdefault(value.content_hash, len(self._rows))


class FrameReader:
    """The frames of a message being read: each array is taken once, in order; images are named by row."""

    def __init__(self, arrays: Sequence[Frame], images: Sequence[Image], limits: Limits) -> None:
        self.limits = limits
        self._arrays: Iterator[Frame] = iter(arrays)
        self._images = images
        self._named: set[int] = set()

    def read(self, hint: Any, value: Any) -> Any:
        """Return the value of type `hint` that `value` represents in the header."""
        if hint is Image:
            if type(value) is not int:
                raise WireError("wrong_type", f"an image's row is {type(value).__name__}, expected int")
            if not 0 <= value < len(self._images):
                raise WireError("missing_frame", f"image {value} of {len(self._images)}")
            self._named.add(value)
            return self._images[value]
        dtype = dtype_of(hint)
        if value != dtype.str:
            raise WireError("wrong_type", f"array of {value!r:.40}, expected {dtype.str!r}")
        frame = next(self._arrays, None)
        if frame is None:
            raise WireError("missing_frame", "header names more arrays than there are frames")
        if len(frame) > self.limits.trajectory_tokens * dtype.itemsize:
            raise WireError("too_large", f"array of {len(frame)} bytes, limit {self.limits.trajectory_tokens} tokens")
        if len(frame) % dtype.itemsize:
            raise WireError("length", f"frame of {len(frame)} bytes for an array of {dtype.str!r}")
        return np.frombuffer(frame, dtype)

    def check_used(self) -> None:
        """Raise WireError unless the message has used all its frames."""
        unused = len(list(self._arrays)) + len(self._images) - len(self._named)
        if unused:
            raise WireError("extra_frames", f"message uses all but {unused} of its frames")
