"""Messages between an actor and its user processes: a length, then msgpack. No pickle, no code.

Records (`Sample`, `Played`) travel whole. What an environment says travels as plain data: numbers, text, bytes, lists
and dicts; a PIL image as the PNG that the engine would be given, NumPy arrays as lists.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from PIL import Image as PILImage

from actor.render import as_png
from envs.base import Played
from shared.types import Image

T = TypeVar("T")
MAX_BYTES = 2**30  # of one message
MAX_FLOAT = int(sys.float_info.max)
_LENGTH = struct.Struct("<Q")


class Call(msgspec.Struct, array_like=True):
    """What a user process is to do."""

    name: str
    body: msgspec.Raw


class Answer(msgspec.Struct, array_like=True):
    """What came of it: `value`, or the type and text of the exception."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    text: str = ""


def send(link: socket.socket, data: bytes, limit_s: float | None) -> None:
    """Sends one message. TimeoutError after `limit_s`; OSError if the other end is gone."""
    link.settimeout(limit_s)
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


def receive(link: socket.socket, limit_s: float | None) -> bytearray:
    """The next message. TimeoutError after `limit_s`, EOFError if the other end is gone, ValueError for one that is too
    large."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, deadline))
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes, limit {MAX_BYTES}")
    return _exactly(link, length, deadline)


def _exactly(link: socket.socket, length: int, deadline: float | None) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        if deadline is not None:
            link.settimeout(max(1e-6, deadline - time.monotonic()))
        else:
            link.settimeout(None)
        count = link.recv_into(view)
        if not count:
            raise EOFError("the other end is gone")
        view = view[count:]
    return data


def pack(value: Any) -> bytes:
    """A record, or anything made of records and plain data."""
    return msgspec.msgpack.encode(value, enc_hook=_of_record)


def unpack(data: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """The value of type `kind` that `pack` was given. msgspec.MsgspecError if it is none."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_to_record)


def unpack_plain(data: bytes | msgspec.Raw) -> Any:
    """What `pack_plain` was given, tuples as lists."""
    return msgspec.msgpack.decode(data)


def pack_played(played: Played) -> bytes:
    """An episode without its environment; TypeError if an info holds what is no plain data."""
    infos = tuple(_storable(msgspec.to_builtins(info, enc_hook=_plain)) for info in played.infos)
    return pack(replace(played, env=None, infos=infos))


def pack_plain(value: Any, what: str) -> bytes:
    """What an environment or a reward returned. TypeError, naming `what` and the type, where it is no plain data."""
    try:
        with contextlib.suppress(OverflowError, UnicodeEncodeError):
            return msgspec.msgpack.encode(value, enc_hook=_plain)
        return msgspec.msgpack.encode(_storable(msgspec.to_builtins(value, enc_hook=_plain)))
    except TypeError as error:
        raise TypeError(f"{what} cannot leave its process: {error}") from None


def _storable(value: Any) -> Any:
    """Plain data as msgpack can hold it. What a model may write has to pass: an integer beyond 64 bits is the nearest
    float, what is no Unicode in a text question marks."""
    if isinstance(value, dict):
        return {_storable(key): _storable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(each) for each in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(max(-MAX_FLOAT, min(value, MAX_FLOAT)))
    return value


def _of_record(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, Image):
        return bytes(value.data), value.content_hash
    return _plain(value)


def _to_record(kind: Any, value: Any) -> Any:
    return Image(*value) if kind is Image else np.frombuffer(value[1], value[0])


def _plain(value: Any) -> Any:
    """What stands for a value for which msgpack has no type."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, PILImage.Image):
        return as_png(value)
    if isinstance(value, Image):
        return value.data
    raise TypeError(f"{type(value).__name__} is no plain data; use numbers, text, lists and dicts")
