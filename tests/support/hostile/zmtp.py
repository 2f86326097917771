"""ZMTP 3.1 by hand over a plain TCP connection, to send data that no ZeroMQ socket would send; and connections that
break off."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

MORE, LONG, COMMAND = 1, 2, 4


def greeting(mechanism: bytes) -> bytes:
    """Return the greeting, the first 64 bytes that a client sends."""
    return b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def head(flags: int, size: int) -> bytes:
    """Return the header of a frame with `size` bytes."""
    return bytes([flags | LONG]) + struct.pack(">Q", size)


def command(name: bytes, body: bytes = b"") -> bytes:
    """Return a whole command frame."""
    content = bytes([len(name)]) + name + body
    return head(COMMAND, len(content)) + content


def message(content: bytes) -> bytes:
    """Return a message of one frame of at most 255 bytes."""
    return bytes([0, len(content)]) + content


def ready(socket_type: bytes = b"DEALER", routing_id: bytes = b"") -> bytes:
    """Return the command that ends a handshake without security."""
    properties = {b"Socket-Type": socket_type, b"Identity": routing_id}
    return command(
        b"READY", b"".join(bytes([len(k)]) + k + struct.pack(">I", len(v)) + v for k, v in properties.items())
    )


def connected(address: str, mechanism: bytes, routing_id: bytes = b"") -> socket.socket:
    """Open a connection to `tcp://HOST:PORT` and exchange greetings; with the mechanism NULL, also complete the
    handshake."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20.0)
    connection.sendall(greeting(mechanism))
    heard = connection.recv(64, socket.MSG_WAITALL)
    if mechanism == b"NULL":
        connection.sendall(ready(routing_id=routing_id))
        while b"READY" not in heard:
            heard += connection.recv(1024)
    return connection


def pour(connection: socket.socket, data: bytes, most: int) -> int:
    """Send `data` repeatedly, up to `most` bytes; return the number of bytes sent before the other end hung up."""
    sent = 0
    with suppress(OSError):
        while sent < most:
            connection.sendall(data)
            sent += len(data)
    return sent


def break_off(connection: socket.socket) -> None:
    """Reset the connection, so that the other end learns of it even if it does not read."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Line:
    """A TCP relay from one client to `tcp://HOST:PORT`, which can reset its connection to that address."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._far = socket.create_connection((host, int(port)))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._broken = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def break_off(self) -> None:
        self._broken.set()
        for thread in self._threads:  # none of them may keep the connection open
            thread.join(5.0)
        self._listener.close()
        break_off(self._far)

    def _run(self) -> None:
        self._listener.settimeout(5.0)
        with suppress(OSError), self._listener.accept()[0] as near:
            back = threading.Thread(target=self._relay, args=(self._far, near), daemon=True)
            self._threads.append(back)
            back.start()
            self._relay(near, self._far)
            back.join(5.0)

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(0.05)
        while not self._broken.is_set():
            try:
                data = source.recv(65536)
                sink.sendall(data)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                return
