"""Bounds the memory that connections of a listening socket can take before a whole message of theirs is there.

libzmq hands over whole messages only. What has come of an unfinished one, or of an unfinished handshake, lies in its
memory without a bound: `ZMQ_MAXMSGSIZE` holds for each frame, and a message may have any number of them. The kernel
knows how many bytes a connection has brought, so that one that has brought too many since its last whole message is
closed. Where the kernel does not tell (it is Linux that does), nothing is closed.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.guards.refusals import Refusals
from shared.log import get_logger

GREETING_BYTES = 2**20  # of a connection before its first whole message; a handshake takes less than 1 KiB
SLACK_BYTES = 2**24  # beyond the largest message: what the kernel holds, and what encryption adds
MAX_UNHEARD = 1024  # connections that have not brought a whole message
LOOK_S, LOOK_UNHEARD_S = 0.05, 0.02  # between two looks; the latter while some connection was never heard
LOOK_EACH_S = 4e-4  # at least, for each connection: a look at one takes 1e-5 s
EVENTS_AT_ONCE = 4096
UNKNOWN = "an unknown address"
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128  # tcpi_bytes_received in Linux's struct tcp_info
Note = Callable[[Mapping[str, Any], str], None]
"""Told each event of the monitor, and the host of the connection that it is about."""


@dataclass(slots=True)
class Connection:
    """One that was accepted; `explained` bytes came before the last look that had heard a whole message of it."""

    peer: tuple[str, int] | None  # None: it was gone before it could be asked
    heard: bool = False
    explained: int = 0
    suspect_since: int = -1  # how much had been read when too many bytes were there; -1 = there are not

    @property
    def host(self) -> str:
        return self.peer[0] if self.peer else UNKNOWN


class ConnectionGuard:
    """Of one socket that is about to bind. For the thread that uses the socket, which tells of each message (`hear`)
    and of each time that none was waiting (`drained`)."""

    def __init__(self, guarded: zmq.Socket, max_message_bytes: int, note: Note | None = None) -> None:
        self.refusals = Refusals("a connection", get_logger("auth"))
        self._guarded, self._note = guarded, note
        self._most = max_message_bytes + SLACK_BYTES
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._heard: set[int] = set()  # since the last look
        self._read = 0  # grows whenever all whole messages that had come by then are read
        self._messages = 0  # since `_read` grew
        self.next_look = 0.0
        self.events = guarded.get_monitor_socket(FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def hear(self, message: zmq.Frame) -> None:
        """A whole message was read, which begins with this frame. Connections are read in turn, so that after as many
        messages as there are connections each one that had a message was heard."""
        with suppress(zmq.ZMQError, TypeError, ValueError):  # no TCP
            self._heard.add(int(message.get("__fd")))
        self._messages += 1
        if self._messages > len(self._connections):
            self.drained()

    def drained(self) -> None:
        """No whole message is waiting."""
        self._read += 1
        self._messages = 0

    def look(self) -> None:
        """Closes what has brought too much. Never waits; does nothing before `next_look`."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.follow()
        unheard = []
        for descriptor, connection in list(self._connections.items()):
            if not self._look_at(descriptor, connection):
                unheard.append(descriptor)
        self._heard.clear()
        for descriptor in unheard[:-MAX_UNHEARD]:
            words = f"more than {MAX_UNHEARD} connections have not sent anything; this is the oldest"
            self._close(descriptor, self._connections[descriptor], "crowd", words)
        every_s = LOOK_UNHEARD_S if unheard else LOOK_S
        self.next_look = now + max(every_s, LOOK_EACH_S * len(self._connections))

    def close(self) -> None:
        self._guarded.disable_monitor()
        self.events.close(0)

    def follow(self) -> None:
        """Reads which connections have come and gone."""
        with suppress(zmq.Again):
            for _ in range(EVENTS_AT_ONCE):
                event = parse_monitor_message(self.events.recv_multipart(zmq.NOBLOCK))
                kind, descriptor = event["event"], event["value"]
                host = UNKNOWN
                if kind == zmq.EVENT_ACCEPTED:
                    self._connections[descriptor] = Connection(_peer_of(descriptor))
                    host = self._connections[descriptor].host
                elif kind == zmq.EVENT_DISCONNECTED and (gone := self._connections.pop(descriptor, None)):
                    host = gone.host
                if self._note is not None:
                    self._note(event, host)

    def _look_at(self, descriptor: int, connection: Connection) -> bool:
        """Whether a whole message of it was ever read. Closes it if it has brought too much since the last one, and
        all that had come when that was noticed is read now."""
        received = _received(descriptor, connection)
        if received is None:
            del self._connections[descriptor]
            return True
        if descriptor in self._heard:
            connection.heard, connection.suspect_since = True, -1
            connection.explained = received
        elif received - connection.explained > (self._most if connection.heard else GREETING_BYTES):
            if connection.suspect_since < 0:
                connection.suspect_since = self._read
            elif self._read > connection.suspect_since:
                much = f"{received - connection.explained} bytes, and no whole message in them"
                self._close(descriptor, connection, "endless" if connection.heard else "greeting", much)
        return connection.heard

    def _close(self, descriptor: int, connection: Connection, reason: str, words: str) -> None:
        self.refusals.add(connection.host, reason, words)
        with suppress(OSError), _socket_of(descriptor, connection) as found:
            if found is not None:
                found.shutdown(socket.SHUT_RDWR)  # libzmq sees its end, and frees what it holds
        self._connections.pop(descriptor, None)
        give_back_memory()


def give_back_memory() -> None:
    """What libzmq has freed goes back to the system; the allocator of some platforms cannot."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _socket_of(descriptor: int, connection: Connection | None) -> Iterator[socket.socket | None]:
    """A second handle of a connection; None if the descriptor is another one's by now. OSError if it is closed."""
    with socket.socket(fileno=os.dup(descriptor)) as handle:
        peer = handle.getpeername()
        same = connection is None or (isinstance(peer, tuple) and peer[:2] == connection.peer)
        yield handle if same else None


def _peer_of(descriptor: int) -> tuple[str, int] | None:
    """The other end's address. The connection may be gone by now, and its descriptor be that of another file."""
    with suppress(OSError), _socket_of(descriptor, None) as handle:
        peer = handle.getpeername() if handle is not None else None
        if isinstance(peer, tuple) and peer:
            return str(peer[0]), int(peer[1])
    return None


def _received(descriptor: int, connection: Connection) -> int | None:
    """Bytes that it has brought; None if it is gone, 0 where the kernel does not tell."""
    with suppress(OSError), _socket_of(descriptor, connection) as found:
        if found is None:
            return None
        option, size = getattr(socket, "TCP_INFO", None), _RECEIVED_AT + _RECEIVED.size
        told = found.getsockopt(socket.IPPROTO_TCP, option, size) if option is not None else b""
        return int(_RECEIVED.unpack_from(told, _RECEIVED_AT)[0]) if len(told) == size else 0
    return None
