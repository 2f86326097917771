"""Typed fields on the wire: how each type hint of `shared.types` is written into and read from a message.

Records are lists of their fields in order. An array stands in the header as its length and takes the next frame; an
image stands there as its sha256 and takes the next frame at its first mention only, so the pictures that a group's
episodes share travel once. Both directions check types, ranges, lengths and hashes; a violation is a `WireError`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import types
import typing
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from shared.types import Group, Hello, Image, Request, Sampling, Ticket, Trajectory, Turn, Welcome
from shared.wire import (
    Codec,
    Sink,
    Source,
    WireError,
    boolean,
    plain,
    read_float,
    read_int,
    read_text,
    write_float,
    write_int,
    write_text,
    wrong,
)

DTYPES: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "behaviour_logprobs": np.dtype("<f4"),
    "policy_versions": np.dtype("<i4"),
}
_INT31 = 2**31 - 1
_RANGES: dict[tuple[type, str], tuple[float, float]] = {
    (Hello, "vocab_size"): (1, _INT31),
    (Hello, "idle_frac"): (0, 1),
    (Request, "slots"): (0, 2**16),
    (Welcome, "version"): (0, _INT31),
    (Ticket, "version"): (0, _INT31),
    (Ticket, "group_size"): (1, 2**16),
    (Ticket, "lease_s"): (0, math.inf),
    (Ticket, "seed"): (0, 2**63 - 1),
    (Sampling, "temperature"): (0, math.inf),
    (Sampling, "top_p"): (0, 1),
    (Sampling, "top_k"): (-1, _INT31),
    (Sampling, "max_new_tokens"): (1, _INT31),
    (Turn, "start"): (0, _INT31),
    (Turn, "end"): (1, _INT31),
    (Group, "played_s"): (0, math.inf),
}

# ------------------------------------------------------------------ frames


def _array_codec(dtype: np.dtype) -> Codec:
    def write(value: Any, sink: Sink) -> int:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise WireError("wrong_type", f" is {got}, expected {dtype.name}[T]")
        sink.frames.append(np.ascontiguousarray(value).data.cast("B") if len(value) else b"")
        return len(value)

    def read(value: Any, source: Source) -> np.ndarray:
        length = read_int(value, source)
        frame = source.take()
        if not 0 <= length <= source.limits.trajectory_tokens:
            raise WireError("too_large", f" has {length} tokens, limit {source.limits.trajectory_tokens}")
        if len(frame) != length * dtype.itemsize:
            raise WireError("length", f" needs {length * dtype.itemsize} bytes, its frame has {len(frame)}")
        return np.frombuffer(frame, dtype)

    return Codec(write, read)


def _write_image(value: Any, sink: Sink) -> str:
    if not isinstance(value, Image) or not isinstance(value.data, bytes):
        raise wrong(value, "Image of bytes")
    if len(value.sha256) != 64:
        raise WireError("image_hash", " has no sha256; make it with Image.of")
    if value.sha256 not in sink.seen:
        sink.seen.add(value.sha256)
        sink.frames.append(value.data)
    return value.sha256


def _read_image(value: Any, source: Source) -> Image:
    sha256 = read_text(value, source)
    image = source.images.get(sha256)
    if image is None:
        data = bytes(source.take())
        if hashlib.sha256(data).hexdigest() != sha256:
            raise WireError("image_hash", f" does not match its sha256 {sha256[:12]}")
        image = source.images[sha256] = Image(data, sha256)
    return image


# ------------------------------------------------------------------ composites


def _tuple_codec(item: Codec) -> Codec:
    def each(convert: Callable[[Any, Any], Any], values: Sequence[Any], side: Any) -> list[Any]:
        done: list[Any] = []
        try:
            for value in values:
                done.append(convert(value, side))
        except WireError as error:
            raise error.inside(f"[{len(done)}]") from None
        return done

    def write(value: Any, sink: Sink) -> list[Any]:
        if not isinstance(value, tuple | list):
            raise wrong(value, "tuple")
        return each(item.write, value, sink)

    def read(value: Any, source: Source) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong(value, "list")
        if len(value) > source.limits.items:
            raise WireError("too_many", f" has {len(value)} items, limit {source.limits.items}")
        return tuple(each(item.read, value, source))

    return Codec(write, read)


def _dict_codec(item: Codec) -> Codec:
    def convert(value: Any, side: Sink | Source, entry_convert: Callable[[Any, Any], Any]) -> dict[str, Any]:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise wrong(value, "dict with str keys")
        if len(value) > side.limits.items:
            raise WireError("too_many", f" has {len(value)} items, limit {side.limits.items}")
        done: dict[str, Any] = {}
        for key, entry in value.items():
            try:
                done[key] = entry_convert(entry, side)
            except WireError as error:
                raise error.inside(f"[{key[:40]!r}]") from None
        return done

    return Codec(lambda v, sink: convert(v, sink, item.write), lambda v, source: convert(v, source, item.read))


def _optional_codec(item: Codec) -> Codec:
    return Codec(
        lambda value, sink: None if value is None else item.write(value, sink),
        lambda value, source: None if value is None else item.read(value, source),
    )


def _enum_codec(enum: type[StrEnum]) -> Codec:
    known = {member.value for member in enum}

    def convert(value: Any, side: Any) -> StrEnum:
        if not isinstance(value, str) or value not in known:
            raise WireError("unknown_value", f" is {str(value)[:40]!r}, no {enum.__name__}")
        return enum(value)

    return Codec(lambda value, sink: convert(value, sink).value, convert)


def _record_codec(cls: type) -> Codec:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    codecs = [_array_codec(DTYPES[n]) if hints[n] is np.ndarray else codec_of(hints[n]) for n in names]
    ranges = [_RANGES.get((cls, n)) for n in names]

    def convert(values: Sequence[Any], side: Any, converters: list[Callable[[Any, Any], Any]]) -> list[Any]:
        done: list[Any] = []
        try:
            for value, converter, bounds in zip(values, converters, ranges, strict=True):
                got = converter(value, side)
                if bounds and not bounds[0] <= got <= bounds[1]:
                    raise WireError("out_of_range", f" is {got}, allowed {bounds[0]}..{bounds[1]}")
                done.append(got)
        except WireError as error:
            raise error.inside(f".{names[len(done)]}") from None
        return done

    def write(value: Any, sink: Sink) -> list[Any]:
        if type(value) is not cls:
            raise wrong(value, cls.__name__)
        return convert([getattr(value, name) for name in names], sink, [c.write for c in codecs])

    def read(value: Any, source: Source) -> Any:
        if type(value) is not list or len(value) != len(names):
            raise WireError("wrong_type", f" is no list of the {len(names)} fields of {cls.__name__}")
        record = cls(*convert(value, source, [c.read for c in codecs]))
        if cls is Trajectory:
            check_lengths(record)
        return record

    return Codec(write, read)


_SCALARS: dict[Any, Codec] = {
    int: Codec(write_int, read_int),
    float: Codec(write_float, read_float),
    str: Codec(write_text, read_text),
    bool: Codec(boolean, boolean),
    Any: Codec(plain, plain),
    Image: Codec(_write_image, _read_image),
}


@functools.cache
def codec_of(hint: Any) -> Codec:
    """The codec of a type hint; every message's whole tree is built once."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[1:] == (Ellipsis,):
        return _tuple_codec(codec_of(args[0]))
    if origin is dict and args[0] is str:
        return _dict_codec(codec_of(args[1]))
    if origin in (types.UnionType, typing.Union) and args[1:] == (types.NoneType,):
        return _optional_codec(codec_of(args[0]))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_codec(hint)
    assert dataclasses.is_dataclass(hint), f"no wire format for {hint}"
    return _record_codec(hint)  # type: ignore[arg-type]


def check_lengths(t: Trajectory) -> None:
    lengths = {len(t.token_ids), len(t.loss_mask), len(t.behaviour_logprobs), len(t.policy_versions)}
    if len(lengths) != 1:
        raise WireError("length", f" has arrays of different lengths {sorted(lengths)}")
