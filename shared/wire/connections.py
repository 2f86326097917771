"""Bound the memory that the connections of a listening socket take with data that nobody has read yet.

libzmq has no usable bound for this. It holds unfinished messages and unfinished handshakes in memory: `ZMQ_MAXMSGSIZE`
limits each frame, and a message may have any number of frames. The queue of whole messages cannot be bounded either:
when it is full, libzmq 4.3.5 stops in the middle of its input, and ends the process if the connection then breaks off
(see `shared.wire.zeromq`).
But the kernel counts the bytes that each connection has received, and the reader counts the bytes that it has read: a
connection with too many unread bytes is closed. No message is lost: an actor keeps what it has sent until it is
acknowledged, and sends it again over its next connection. Only Linux reports received bytes; elsewhere nothing is
closed.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.log import get_logger
from shared.util.process_memory import give_back_memory
from shared.util.refusals import Refusals
from shared.wire.kernel_sockets import KernelSocket

LITTLE_BYTES = 2**20  # limit before a connection's first whole message; a handshake takes less than 1 KiB
SLACK_BYTES = 2**24  # allowed beyond the largest message, for the kernel's buffers and for encryption
# Unread messages of one connection beyond `LITTLE_BYTES`, estimated from the mean size of those read since.
MAX_UNREAD = 2**14
TELLING = 64  # messages needed for that mean size
MAX_UNHEARD = 1024  # connections without a whole message so far
LOOK_S = 0.05  # interval between two looks
# The interval while nothing of a connection was ever read, or one has too many unread bytes and the reader has not yet
# read everything that waited.
LOOK_UNSURE_S = 0.005
LOOK_EACH_S = 4e-4  # lower bound of the interval, per connection: a look at one takes 4e-6 s
EVENTS_AT_ONCE = 4096
CLOSE_S = 5.0
UNKNOWN = "an unknown address"
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
Note = Callable[[Mapping[str, Any], str], None]
"""Is called with each event of the monitor, and the host of the connection that it is about."""


@dataclass(slots=True)
class ReadCount:
    """What the reader has read from one descriptor's connection. Only the reader changes it."""

    messages: int = 0
    num_bytes: int = 0  # as counted on the wire


@dataclass(slots=True)
class Connection:
    """An accepted connection. If it has too many unread bytes, `suspect_since` is the reader's round when that began,
    and `then` what had been read of it by then; else `suspect_since` is -1."""

    descriptor: int
    socket: KernelSocket
    read: ReadCount
    # Bytes counted as read from this connection that came over an earlier one with the same descriptor.
    forgiven: int = 0
    suspect_since: int = -1
    then: ReadCount = field(default_factory=ReadCount)

    @property
    def host(self) -> str:
        return self.socket.peer[0] if self.socket.peer else UNKNOWN

    def unread(self, surplus: int) -> int:
        """Return the number of unread bytes: whole messages, the beginning of one, and ZeroMQ's own commands. `surplus`
        is how many more bytes were received than read."""
        surplus += self.forgiven
        self.forgiven -= min(0, surplus)
        return max(0, surplus)


class ConnectionGuard:
    """Watches the connections of one socket that is about to bind. Its own thread waits for events of the socket and
    looks at the connections at intervals, however busy the reader is. The reader must call `count_read` for each
    message and `drained` whenever none was waiting. When `asks` becomes readable, the guard asks the reader to look for
    a message."""

    def __init__(self, guarded: zmq.Socket, max_message_bytes: int, note: Note | None = None) -> None:
        self.refusals = Refusals("a connection", get_logger("auth"))
        self._guarded, self._note = guarded, note
        self._most = max_message_bytes + SLACK_BYTES
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._read: dict[int, ReadCount] = {}  # by file descriptor
        self._round = 0  # grows whenever all whole messages received so far are read
        self._messages = 0  # messages read since `_round` grew
        kinds = FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self._events = guarded.get_monitor_socket(kinds)
        self.asks, self._ask = socket.socketpair()
        for each in (self.asks, self._ask):
            each.setblocking(False)
        self._closing = self._asked = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- the reader's side

    def count_read(self, message: zmq.Frame, num_bytes: int) -> None:
        """Count a whole message that was read: `message` is its first frame, `num_bytes` its size on the wire. libzmq
        reads connections in turn, so that after as many messages as there are connections, each connection that had a
        message was read."""
        try:
            read = self._read.get(descriptor := int(message.get("__fd")))
            if read is None:
                read = self._read.setdefault(descriptor, ReadCount())
            read.num_bytes += num_bytes
            read.messages += 1
        except (zmq.ZMQError, TypeError, ValueError):  # not a TCP connection
            pass
        self._messages += 1
        if self._messages > len(self._connections):
            self.drained()

    def drained(self) -> None:
        """Note that no whole message is waiting. Raise RuntimeError if the guard's thread has failed."""
        if self._failure is not None:
            raise RuntimeError("nobody guards the connections any more") from self._failure
        if self._asked:  # reading an empty socket would cost a microsecond per message
            self._asked = False
            with suppress(BlockingIOError):
                self.asks.recv(4096)
        self._round += 1
        self._messages = 0

    def close(self) -> None:
        self._closing = True
        self._guarded.disable_monitor()  # this wakes the thread
        self._thread.join(CLOSE_S)
        self.asks.close()
        self._ask.close()

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        next_look = 0.0
        try:
            while not self._closing:
                self._events.poll(max(0, math.ceil(1000 * (next_look - time.monotonic()))))
                known = len(self._connections)
                self._follow()
                now = time.monotonic()
                if len(self._connections) > known:  # a new connection can bring 100 MB in 50 ms
                    next_look = min(next_look, now + LOOK_UNSURE_S)
                if now >= next_look:
                    next_look = now + self._look()
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self._failure = error
        finally:
            self._events.close(0)

    def _follow(self) -> None:
        """Update the connections from the socket's events."""
        with suppress(zmq.Again):
            for _ in range(EVENTS_AT_ONCE):
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
                kind, descriptor = event["event"], event["value"]
                host = UNKNOWN
                if kind == zmq.EVENT_ACCEPTED:
                    host = self._accepted(descriptor)
                elif kind == zmq.EVENT_DISCONNECTED and (gone := self._forget(descriptor)):
                    host = gone.host
                if self._note is not None:
                    self._note(event, host)

    def _accepted(self, descriptor: int) -> str:
        """Watch a new connection and return its host; UNKNOWN for a connection that is already gone, which is not
        watched."""
        self._forget(descriptor)
        read = self._read.setdefault(descriptor, ReadCount())
        with suppress(OSError):
            accepted = self._connections[descriptor] = Connection(descriptor, KernelSocket(descriptor), read)
            return accepted.host
        return UNKNOWN

    def _look(self) -> float:
        """Close connections with too many unread bytes; return the seconds until the next look."""
        unheard, is_unsure = [], False
        for descriptor, connection in list(self._connections.items()):
            num_read = connection.read.num_bytes  # read before the kernel's count, so that it is never larger
            received = connection.socket.bytes_received()
            if received is None:
                self._forget(descriptor)
                continue
            if reason := self._too_much(connection, connection.unread(received - num_read)):
                self._close(connection, *reason)
            elif not connection.read.messages:
                unheard.append(descriptor)
            is_unsure |= connection.suspect_since >= 0 and not self._came_round(connection)
        for descriptor in unheard[:-MAX_UNHEARD]:
            words = f"more than {MAX_UNHEARD} connections have not sent anything; this is the oldest"
            self._close(self._connections[descriptor], "crowd", words)
        if is_unsure:
            with suppress(BlockingIOError):  # the socket is full of earlier requests
                self._ask.send(b"\0")
            self._asked = True
        every_s = LOOK_UNSURE_S if is_unsure or unheard else LOOK_S
        return max(every_s, LOOK_EACH_S * len(self._connections))

    def _came_round(self, connection: Connection) -> bool:
        """Tell whether the reader has read all whole messages that were there when this connection became suspect. One
        more round is needed, since the round that ended next may have begun before."""
        return self._round > connection.suspect_since + 1

    def _too_much(self, connection: Connection, unread: int) -> tuple[str, str] | None:
        """Return (reason, words) if a connection has too many unread bytes; None otherwise. Whether they are one
        endless message is known only once the reader has completed a round since the connection became suspect."""
        read = connection.read
        if unread <= LITTLE_BYTES:
            connection.suspect_since = -1
            return None
        if connection.suspect_since < 0:
            connection.suspect_since, connection.then = self._round, ReadCount(read.messages, read.num_bytes)
        messages = read.messages - connection.then.messages
        num_bytes = read.num_bytes - connection.then.num_bytes
        if self._came_round(connection) and not read.messages:
            return "greeting", f"{unread} bytes, and no whole message in them"
        if unread > self._most:
            if self._came_round(connection) and not messages:
                return "endless", f"{unread} bytes, and no whole message in them"
            return "flood", f"{unread} bytes that it has sent are not read yet"
        if messages >= TELLING and unread * messages > MAX_UNREAD * num_bytes:
            return "flood", f"{unread} bytes of messages that have {num_bytes // messages} each are not read yet"
        return None

    def _close(self, connection: Connection, reason: str, words: str) -> None:
        self.refusals.add(connection.host, reason, words)
        connection.socket.shut()  # libzmq sees the connection end and frees its memory
        self._forget(connection.descriptor)
        give_back_memory()

    def _forget(self, descriptor: int) -> Connection | None:
        """Forget a connection and return it. What is read under its descriptor from now on counts for the next
        connection."""
        gone = self._connections.pop(descriptor, None)
        if gone is not None:
            self._read[descriptor] = ReadCount()
        return gone


def seed_routing_ids() -> None:
    """Seed the numbers that libzmq gives peers without a routing id. Call it before a ROUTER is made. libzmq 4.3.5
    numbers such peers from a `rand()` that it never seeds, and ends the process when another peer has claimed that
    number as its routing id."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
