"""Access to libzmq's sockets through the kernel: received bytes, the peer's address, shutdown."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_COOKIE = 57  # SO_COOKIE: unique among all sockets, past and present, of the machine
_RECEIVED_AT = 128  # tcpi_bytes_received in Linux's struct tcp_info
_NUMBER = struct.Struct("<Q")
_INFO_BYTES = _RECEIVED_AT + _NUMBER.size
_TCP_INFO = getattr(socket, "TCP_INFO", None)


class KernelSocket:
    """The socket that has this descriptor now. It still belongs to its owner, who may close it at any time; the
    descriptor may then be reused for another socket. (The descriptor is not duplicated, since that would fail when
    descriptors run out.)

    All calls here keep the interpreter's lock: hundreds of them many times a second cost other threads little, whereas
    a call that releases the lock may wait milliseconds to get it back.
    The constructor raises OSError if the descriptor is no socket."""

    def __init__(self, descriptor: int) -> None:
        self._handle = socket.socket(fileno=descriptor)
        self._cookie = self._ask_cookie()
        self.peer: tuple[str, int] | None = None  # address of the other end, if there is one
        with suppress(OSError):
            peer = self._handle.getpeername()
            if isinstance(peer, tuple) and peer:
                self.peer = str(peer[0]), int(peer[1])

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._handle.detach()  # else it would close a descriptor that it does not own

    def _ask_cookie(self) -> bytes:
        try:
            return self._handle.getsockopt(socket.SOL_SOCKET, _COOKIE, _NUMBER.size)
        except OSError:
            return b""

    @property
    def is_open(self) -> bool:
        """True while the descriptor is still this socket's."""
        return self._ask_cookie() == self._cookie

    def bytes_received(self) -> int | None:
        """Return how many bytes this TCP connection has received; None if it is gone, 0 where the kernel does not
        report it."""
        if not self.is_open:
            return None
        if _TCP_INFO is None:
            return 0
        try:
            info = self._handle.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        except OSError:
            return None
        return int(_NUMBER.unpack_from(info, _RECEIVED_AT)[0]) if len(info) == _INFO_BYTES else 0

    def shut(self) -> None:
        """Shut down the connection in both directions; the owner of the socket sees it closed."""
        if self.is_open:
            with suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)
