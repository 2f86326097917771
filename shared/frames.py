"""Ground of the wire format: its error, its limits, the frames of one message, and the scalars that a header holds."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shared.types import Image

Frame = bytes | memoryview


class WireError(ValueError):
    """A message that breaks the contract. `reason` is a short fixed word for counters, `detail` is for people.

    `ticket_id` is the ticket of a group that could not be decoded, as far as its header could be read, else "".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.ticket_id = ""

    def inside(self, where: str) -> WireError:
        return WireError(self.reason, f"{where}{self.detail}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may hold. Sizes in bytes; `items` bounds every list, `text_chars` every string."""

    message_bytes: int = 256 * 2**20
    header_bytes: int = 32 * 2**20
    frames: int = 2**16
    items: int = 2**16
    text_chars: int = 2**22
    trajectory_tokens: int = 2**20
    depth: int = 16


DEFAULT_LIMITS = Limits()


def digest(frames: Sequence[Frame]) -> bytes:
    """XXH3 (128 bits) of the frames and their lengths: it changes with every bit and every boundary. No secret is in
    it: it tells damage, not forgery."""
    hasher = xxhash.xxh3_128(struct.pack(f"<{len(frames)}Q", *map(len, frames)))
    for frame in frames:
        hasher.update(frame)
    return hasher.digest()


@dataclass(slots=True)
class Sink:
    """A message being written: the frames of its arrays, and its images, each once."""

    limits: Limits
    frames: list[Frame] = field(default_factory=list)
    images: list[Frame] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)  # of `images`, by content hash


@dataclass(slots=True)
class Source:
    """A message being read: each frame is taken once, in order; images have been checked, and are named by row."""

    frames: Sequence[Frame]
    limits: Limits
    images: Sequence[Image] = ()
    position: int = 1  # behind the header
    named: set[int] = field(default_factory=set)  # rows of `images`

    def take(self) -> Frame:
        if self.position >= len(self.frames):
            raise WireError("missing_frame", f"header names more than {len(self.frames)} frames")
        self.position += 1
        return self.frames[self.position - 1]


class Codec(NamedTuple):
    """How one type hint is written and read. Both directions check."""

    write: Callable[[Any, Sink], Any]
    read: Callable[[Any, Source], Any]


# ------------------------------------------------------------------ scalars


def wrong(value: Any, expected: str) -> WireError:
    return WireError("wrong_type", f" is {type(value).__name__}, expected {expected}")


def write_int(value: Any, sink: Sink) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise wrong(value, "int")
    return int(value)


def read_int(value: Any, source: Source) -> int:
    if type(value) is not int:
        raise wrong(value, "int")
    return value


def write_float(value: Any, sink: Sink) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise wrong(value, "float")
    return finite(float(value))


def read_float(value: Any, source: Source) -> float:
    if type(value) is not float:
        raise wrong(value, "float")
    return finite(value)


def finite(value: float) -> float:
    if not math.isfinite(value):
        raise WireError("not_finite", f" is {value}")
    return value


def write_text(value: Any, sink: Sink) -> str:
    if not isinstance(value, str):
        raise wrong(value, "str")
    return str(value)


def read_text(value: Any, source: Source) -> str:
    if type(value) is not str:
        raise wrong(value, "str")
    if len(value) > source.limits.text_chars:
        raise WireError("too_large", f" has {len(value)} characters, limit {source.limits.text_chars}")
    return value


def boolean(value: Any, side: Any) -> bool:
    if type(value) is not bool:
        raise wrong(value, "bool")
    return value


def plain(value: Any, side: Sink | Source) -> Any:
    """Values of free-form fields: None, bool, int, float, str, lists and string-keyed dicts of them."""
    return _plain_at(value, side.limits.depth, side.limits.items)


def _plain_at(value: Any, depth: int, items: int) -> Any:
    if depth == 0:
        raise WireError("too_deep", " is nested too deeply")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        if not -(2**63) <= value < 2**63:
            raise WireError("out_of_range", " is an integer of more than 64 bits")
        return int(value)
    if isinstance(value, float | np.floating):
        return finite(float(value))
    if isinstance(value, list | tuple | dict) and len(value) > items:
        raise WireError("too_many", f" has {len(value)} items, limit {items}")
    if isinstance(value, list | tuple):
        return [_plain_at(item, depth - 1, items) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain_at(item, depth - 1, items) for key, item in value.items()}
    raise wrong(value, "None, bool, int, float, str, list or dict with str keys")
