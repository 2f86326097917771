"""ZMTP 3.1 by hand, over a plain TCP connection: what no ZeroMQ socket would send."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

MORE, LONG, COMMAND = 1, 2, 4


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of a client."""
    return b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def head(flags: int, size: int) -> bytes:
    """What stands before the `size` bytes of a frame."""
    return bytes([flags | LONG]) + struct.pack(">Q", size)


def ready() -> bytes:
    """The command that ends the handshake of a DEALER without security."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return bytes([COMMAND, len(body)]) + body


def connected(address: str, mechanism: bytes) -> socket.socket:
    """A connection to `tcp://HOST:PORT` that has said its greeting; without security it is ready for messages."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20.0)
    connection.sendall(greeting(mechanism))
    heard = connection.recv(64, socket.MSG_WAITALL)
    if mechanism == b"NULL":
        connection.sendall(ready())
        while b"READY" not in heard:
            heard += connection.recv(1024)
    return connection


def pour(connection: socket.socket, data: bytes, most: int) -> int:
    """Sends `data` again and again, up to `most` bytes; returns how many it got rid of before the other end hung up."""
    sent = 0
    with suppress(OSError):
        while sent < most:
            connection.sendall(data)
            sent += len(data)
    return sent
