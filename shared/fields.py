"""Typed fields on the wire: how each type hint of `shared.types` is written into and read from a message.

Records are lists of their fields in order; many records of numbers alone are a list of their columns, so that each
column is checked at once. An array stands in the header as its length and takes the next frame; an image stands there
as its row in the message's table of images, so the images that a group's episodes share travel once. Both
directions check types, ranges and lengths; a violation is a `WireError`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from shared.frames import (
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
from shared.types import Group, Hello, Image, Request, Sampling, Ticket, Trajectory, Turn, Welcome

DTYPES: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "behaviour_logprobs": np.dtype("<f4"),
    "policy_versions": np.dtype("<i4"),
}
_INT31 = 2**31 - 1
HASH_DIGITS = 32
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


def _write_images(value: Any, sink: Sink) -> list[int]:
    if not isinstance(value, tuple | list) or not set(map(type, value)) <= {Image}:
        raise wrong(value, "tuple of Image")
    rows = []
    for image in value:
        row = sink.rows.get(image.content_hash)
        if row is None:
            if len(image.content_hash) != HASH_DIGITS or not isinstance(image.data, bytes | memoryview):
                raise WireError("image_hash", " holds no bytes or no content hash; make it with Image.of")
            row = sink.rows[image.content_hash] = len(sink.images)
            sink.images.append(image.data)
        rows.append(row)
    return rows


def _read_images(value: Any, source: Source) -> tuple[Image, ...]:
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise wrong(value, "list of rows")
    if len(value) > source.limits.items:
        raise WireError("too_many", f" has {len(value)} items, limit {source.limits.items}")
    if value and not (min(value) >= 0 and max(value) < len(source.images)):
        raise WireError("missing_frame", f" names images {min(value)}..{max(value)} of {len(source.images)}")
    source.named.update(value)
    return tuple([source.images[row] for row in value])


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


def _columns_codec(cls: type) -> Codec:
    """A tuple of records of numbers, as the list of their columns."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    columns = [(name, operator.attrgetter(name), hints[name], _RANGES.get((cls, name))) for name in names]

    def check(name: str, column: list[Any], kind: type, bounds: tuple[float, float] | None) -> None:
        if not set(map(type, column)) <= {kind}:
            raise WireError("wrong_type", f".{name} holds something else than {kind.__name__}")
        if kind is float and not all(map(math.isfinite, column)):
            raise WireError("not_finite", f".{name} holds a number that is not finite")
        lowest, highest = (min(column), max(column)) if bounds and column else (0, 0)
        if bounds and column and not (bounds[0] <= lowest and highest <= bounds[1]):
            raise WireError("out_of_range", f".{name} is {lowest}..{highest}, allowed {bounds[0]}..{bounds[1]}")

    def write(value: Any, sink: Sink) -> list[list[Any]]:
        if not isinstance(value, tuple | list) or not set(map(type, value)) <= {cls}:
            raise wrong(value, f"tuple of {cls.__name__}")
        table = []
        for name, get, kind, bounds in columns:
            column = list(map(get, value))
            if not set(map(type, column)) <= {kind}:  # numpy's numbers
                column = [_SCALARS[kind].write(number, sink) for number in column]
            check(name, column, kind, bounds)
            table.append(column)
        return table

    def read(value: Any, source: Source) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(columns) or set(map(type, value)) != {list}:
            raise WireError("wrong_type", f" is no list of the {len(columns)} columns of {cls.__name__}")
        if len(value[0]) > source.limits.items:
            raise WireError("too_many", f" has {len(value[0])} items, limit {source.limits.items}")
        if len(set(map(len, value))) != 1:
            raise WireError("length", f" has columns of {list(map(len, value))} items")
        for column, (name, _, kind, bounds) in zip(value, columns, strict=True):
            check(name, column, kind, bounds)
        return tuple(map(cls, *value))

    return Codec(write, read)


def _ranged(convert: Callable[[Any, Any], Any], lowest: float, highest: float) -> Callable[[Any, Any], Any]:
    def ranged(value: Any, side: Any) -> Any:
        got = convert(value, side)
        if not lowest <= got <= highest:
            raise WireError("out_of_range", f" is {got}, allowed {lowest}..{highest}")
        return got

    return ranged


def _record_codec(cls: type) -> Codec:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    codecs = [_array_codec(DTYPES[n]) if hints[n] is np.ndarray else codec_of(hints[n]) for n in names]
    for place, name in enumerate(names):
        if bounds := _RANGES.get((cls, name)):
            codecs[place] = Codec(*(_ranged(convert, *bounds) for convert in codecs[place]))
    writers, readers = [c.write for c in codecs], [c.read for c in codecs]

    def convert(values: Sequence[Any], side: Any, converters: list[Callable[[Any, Any], Any]]) -> list[Any]:
        done: list[Any] = []
        try:
            for converter, value in zip(converters, values, strict=True):
                done.append(converter(value, side))
        except WireError as error:
            raise error.inside(f".{names[len(done)]}") from None
        return done

    def write(value: Any, sink: Sink) -> list[Any]:
        if type(value) is not cls:
            raise wrong(value, cls.__name__)
        return convert([getattr(value, name) for name in names], sink, writers)

    def read(value: Any, source: Source) -> Any:
        if type(value) is not list or len(value) != len(names):
            raise WireError("wrong_type", f" is no list of the {len(names)} fields of {cls.__name__}")
        record = cls(*convert(value, source, readers))
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
    tuple[Image, ...]: Codec(_write_images, _read_images),
}


@functools.cache
def codec_of(hint: Any) -> Codec:
    """The codec of a type hint; every message's whole tree is built once."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[1:] == (Ellipsis,):
        return _columns_codec(args[0]) if _is_row(args[0]) else _tuple_codec(codec_of(args[0]))
    if origin is dict and args[0] is str:
        return _dict_codec(codec_of(args[1]))
    if origin in (types.UnionType, typing.Union) and args[1:] == (types.NoneType,):
        return _optional_codec(codec_of(args[0]))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_codec(hint)
    assert dataclasses.is_dataclass(hint), f"no wire format for {hint}"
    return _record_codec(hint)  # type: ignore[arg-type]


def _is_row(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and set(typing.get_type_hints(hint).values()) <= {int, float}


def check_lengths(t: Trajectory) -> None:
    lengths = len(t.token_ids), len(t.loss_mask), len(t.behaviour_logprobs), len(t.policy_versions)
    if lengths.count(lengths[0]) != len(lengths):
        raise WireError("length", f" has arrays of different lengths {sorted(set(lengths))}")
