"""Messages between an actor and its user processes: a length, then msgpack. No pickle, no code.

Records (`Sample`, `Played`) are sent with all fields. Values from an environment are sent as plain data: numbers, text,
bytes, lists and dicts; a PIL image becomes the PNG that the engine would get, NumPy arrays become lists.
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

from envs.base import Played
from shared.rgb_images import as_png
from shared.types import Image

T = TypeVar("T")
MAX_BYTES = 2**30  # in one message
MAX_INFO_BYTES = 2**18  # of a step, beyond which large entries of its info stay in the process
MAX_ENTRY_BYTES = 2**15
MAX_FLOAT = int(sys.float_info.max)
_LENGTH = struct.Struct("<Q")


class UserCall(msgspec.Struct, array_like=True):
    """A call of a user process."""

    name: str
    body: msgspec.Raw


class UserAnswer(msgspec.Struct, array_like=True):
    """The result of a call: `value`, or the exception's type, text, place and traceback."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    text: str = ""
    place: str = ""
    trace: str = ""


def send(link: socket.socket, data: bytes, limit_s: float | None) -> None:
    """Send one message. Raise TimeoutError after `limit_s`, OSError if the other end is gone."""
    link.settimeout(limit_s)
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


def receive(link: socket.socket, limit_s: float | None) -> bytearray:
    """Return the next message. Raise TimeoutError after `limit_s`, EOFError if the other end is gone, ValueError for a
    message that is too large."""
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
    """Return a record, or anything made of records and plain data, as bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_of_record)


def unpack(data: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """Return the value of type `kind` that `pack` was given. Raise msgspec.MsgspecError if it is not of that type."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_to_record)


def unpack_plain(data: bytes | msgspec.Raw) -> Any:
    """Return the value that `pack_plain` was given, with tuples as lists."""
    return msgspec.msgpack.decode(data)


def pack_played(played: Played) -> bytes:
    """Return an episode without its environment as bytes; without its images, if they are those of the trajectory.
    Raise TypeError if an info holds anything but plain data."""
    images = () if played.images == tuple(played.trajectory.images) else played.images
    return pack(replace(played, env=None, infos=tuple(map(_storable_of, played.infos)), images=images))


def pack_plain(value: Any, what: str) -> bytes:
    """Return the result of an environment or a reward as bytes. Raise TypeError, which names `what` and the type, if it
    is not plain data."""
    try:
        with contextlib.suppress(OverflowError, UnicodeEncodeError):
            return msgspec.msgpack.encode(value, enc_hook=_plain)
        return msgspec.msgpack.encode(_storable_of(value))
    except TypeError as error:
        raise TypeError(f"{what} cannot leave its process: {error}") from None


def pack_with_info(values: list[Any], info: Any, what: str) -> bytes:
    """Return [*values, info] as `pack_plain` does. What is no plain data in an environment's info becomes the name of
    its type, and what is large stays in its process, with a word in its place: all but the reward only describes the
    turn, and the actor would hold it until the episode ends."""
    packed = [msgspec.Raw(pack_plain(value, what)) for value in values]  # once: an image is encoded for it
    try:
        packed_info = pack_plain(info, what)
    except Exception:  # noqa: BLE001 - a user's object may raise anything when it is read
        info = _sendable(info)
        packed_info = pack_plain(info, what)
    data = pack([*packed, msgspec.Raw(packed_info)])
    if len(data) <= MAX_INFO_BYTES or not isinstance(info, dict):
        return data
    small_info = pack_plain({key: _small(value) for key, value in info.items()}, what)
    return pack([*packed, msgspec.Raw(small_info)])


def _small(value: Any) -> Any:
    size = len(pack_plain(value, ""))
    return value if size <= MAX_ENTRY_BYTES else f"({type(value).__name__} of {size:,} bytes, kept in its process)"


def _sendable(info: Any) -> Any:
    if not isinstance(info, dict):
        return info
    return {key: _plain_or_name(value, depth=2) if key != "reward" else value for key, value in info.items()}


def _plain_or_name(value: Any, depth: int) -> Any:
    try:
        pack_plain(value, "")
    except Exception:  # noqa: BLE001 - a user's object may raise anything
        if isinstance(value, dict) and depth:
            return {str(key): _plain_or_name(each, depth - 1) for key, each in value.items()}
        return f"({type(value).__name__})"
    return value


def _storable_of(value: Any) -> Any:
    """Return any value that has a plain form as plain data that msgpack can hold; bytes, such as an image's, stay
    bytes. Raise TypeError if there is no such form."""
    return _storable(msgspec.to_builtins(value, enc_hook=_plain, builtin_types=(bytes, bytearray, memoryview)))


def _storable(value: Any) -> Any:
    """Return plain data in a form that msgpack can hold. Anything that a model may write must pass: an integer beyond
    64 bits becomes the nearest float, and invalid Unicode in a text becomes question marks."""
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
    """Return plain data that represents a value for which msgpack has no type. Raise TypeError if there is no such
    form."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, PILImage.Image):
        return as_png(value)
    if isinstance(value, Image):
        return value.data
    raise TypeError(f"{type(value).__name__} is no plain data; use numbers, text, lists and dicts")
