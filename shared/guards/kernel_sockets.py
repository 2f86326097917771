"""What the kernel tells of sockets that are libzmq's."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_COOKIE = 57  # SO_COOKIE: a number that no other socket of the machine has or had
_RECEIVED_AT = 128  # tcpi_bytes_received in Linux's struct tcp_info
_NUMBER = struct.Struct("<Q")
_INFO_BYTES = _RECEIVED_AT + _NUMBER.size
_TCP_INFO = getattr(socket, "TCP_INFO", None)


class KernelSocket:
    """The socket that has this descriptor now. It stays its owner's, who may close it at any time; the descriptor may
    be another one's then. (A copy of the descriptor could not be had when descriptors are short.)

    The questions are such as keep the interpreter's lock: hundreds of them, many times a second, cost the threads
    beside little; one that lets go of the lock may wait milliseconds for it afterwards.
    OSError: the descriptor is no socket."""

    def __init__(self, descriptor: int) -> None:
        self._handle = socket.socket(fileno=descriptor)
        self._cookie = self._ask_cookie()
        self.peer: tuple[str, int] | None = None  # the other end, if there is one
        with suppress(OSError):
            peer = self._handle.getpeername()
            if isinstance(peer, tuple) and peer:
                self.peer = str(peer[0]), int(peer[1])

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._handle.detach()  # else it would close what is not its own

    def _ask_cookie(self) -> bytes:
        try:
            return self._handle.getsockopt(socket.SOL_SOCKET, _COOKIE, _NUMBER.size)
        except OSError:
            return b""

    @property
    def is_open(self) -> bool:
        """Whether the descriptor is still this socket's."""
        return self._ask_cookie() == self._cookie

    def bytes_received(self) -> int | None:
        """That this TCP connection has brought; None if it is gone, 0 where the kernel does not tell."""
        if not self.is_open:
            return None
        if _TCP_INFO is None:
            return 0
        try:
            told = self._handle.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        except OSError:
            return None
        return int(_NUMBER.unpack_from(told, _RECEIVED_AT)[0]) if len(told) == _INFO_BYTES else 0

    def shut(self) -> None:
        """Ends the connection in both directions: its owner finds it closed."""
        if self.is_open:
            with suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)
