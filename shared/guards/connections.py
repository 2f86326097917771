"""Bounds the memory that connections of a listening socket can take before its reader has their messages.

libzmq has no bound for it that could be used. What has come of an unfinished message, or of an unfinished handshake,
lies in its memory: `ZMQ_MAXMSGSIZE` holds for each frame, and a message may have any number of them. A queue of whole
messages that is full makes libzmq 4.3.5 stop in the middle of what it has read, and a connection that then breaks off
ends the process when it goes on (see `shared.transport`); so the queue has no bound either. But the kernel knows how
many bytes a connection has brought, and the reader what it has read: a connection of which too much is not read is
closed. An actor keeps what it has sent until it is told that it was taken, and sends it again over its next connection.
Where the kernel does not tell (it is Linux that does), nothing is closed.
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

from shared.guards.kernel_sockets import KernelSocket
from shared.guards.memory import give_back_memory
from shared.guards.refusals import Refusals
from shared.log import get_logger

LITTLE_BYTES = 2**20  # of a connection before its first whole message; a handshake takes less than 1 KiB
SLACK_BYTES = 2**24  # beyond the largest message: what the kernel holds, and what encryption adds
MAX_UNREAD = 2**14  # messages of one connection in more than `LITTLE_BYTES`, as far as those tell that were read since
TELLING = 64  # messages, before their sizes tell anything
MAX_UNHEARD = 1024  # connections that have not brought a whole message
LOOK_S = 0.05  # between two looks
LOOK_UNSURE_S = 0.005  # while a connection was never heard, or has too much and the reader has not come round
LOOK_EACH_S = 4e-4  # at least, for each connection: a look at one takes 4e-6 s
EVENTS_AT_ONCE = 4096
CLOSE_S = 5.0
UNKNOWN = "an unknown address"
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
Note = Callable[[Mapping[str, Any], str], None]
"""Told each event of the monitor, and the host of the connection that it is about."""


@dataclass(slots=True)
class Heard:
    """What the reader has read of one descriptor's connection. It alone changes this."""

    messages: int = 0
    num_bytes: int = 0  # on the wire


@dataclass(slots=True)
class Connection:
    """One that was accepted. Too much of it is unread since a moment at which the reader was in round `suspect_since`
    (-1: not so) and had read `then` of it."""

    descriptor: int
    socket: KernelSocket
    heard: Heard
    forgiven: int = 0  # bytes that were read in its name, but had come over the one that had its descriptor before
    suspect_since: int = -1
    then: Heard = field(default_factory=Heard)

    @property
    def host(self) -> str:
        return self.socket.peer[0] if self.socket.peer else UNKNOWN

    def unread(self, surplus: int) -> int:
        """Bytes, given how many more have come than were read: whole messages, the beginning of one, and commands of
        ZeroMQ's."""
        surplus += self.forgiven
        self.forgiven -= min(0, surplus)
        return max(0, surplus)


class ConnectionGuard:
    """Of one socket that is about to bind. A thread of its own looks at the connections, whatever keeps the reader
    busy; it waits for events of the socket's, and the next look. The reader tells of each message (`hear`) and of each
    time that none was waiting (`drained`); it is asked to look for one when `asks` becomes readable."""

    def __init__(self, guarded: zmq.Socket, max_message_bytes: int, note: Note | None = None) -> None:
        self.refusals = Refusals("a connection", get_logger("auth"))
        self._guarded, self._note = guarded, note
        self._most = max_message_bytes + SLACK_BYTES
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._heard: dict[int, Heard] = {}  # by file descriptor
        self._round = 0  # grows whenever all whole messages that had come by then are read
        self._messages = 0  # since `_round` grew
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

    def hear(self, message: zmq.Frame, num_bytes: int) -> None:
        """A whole message was read, which begins with this frame and took so much of the wire. Connections are read in
        turn, so that after as many messages as there are connections each one that had a message was heard."""
        try:
            heard = self._heard.get(descriptor := int(message.get("__fd")))
            if heard is None:
                heard = self._heard.setdefault(descriptor, Heard())
            heard.num_bytes += num_bytes
            heard.messages += 1
        except (zmq.ZMQError, TypeError, ValueError):  # no TCP
            pass
        self._messages += 1
        if self._messages > len(self._connections):
            self.drained()

    def drained(self) -> None:
        """No whole message is waiting. Raises what has ended the thread."""
        if self._failure is not None:
            raise RuntimeError("nobody guards the connections any more") from self._failure
        if self._asked:  # reading in vain would cost a microsecond a message
            self._asked = False
            with suppress(BlockingIOError):
                self.asks.recv(4096)
        self._round += 1
        self._messages = 0

    def close(self) -> None:
        self._closing = True
        self._guarded.disable_monitor()  # which wakes the thread
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
                if len(self._connections) > known:  # a new one brings 100 MB in 50 ms, if nobody looks
                    next_look = min(next_look, now + LOOK_UNSURE_S)
                if now >= next_look:
                    next_look = now + self._look()
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self._failure = error
        finally:
            self._events.close(0)

    def _follow(self) -> None:
        """Reads which connections have come and gone."""
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
        """The new connection's host. One that is gone already is not looked at."""
        self._forget(descriptor)
        heard = self._heard.setdefault(descriptor, Heard())
        with suppress(OSError):
            accepted = self._connections[descriptor] = Connection(descriptor, KernelSocket(descriptor), heard)
            return accepted.host
        return UNKNOWN

    def _look(self) -> float:
        """Closes what has brought too much; returns after how many seconds to look again."""
        unheard, is_unsure = [], False
        for descriptor, connection in list(self._connections.items()):
            read = connection.heard.num_bytes  # first: so it is never more than what has come
            received = connection.socket.bytes_received()
            if received is None:
                self._forget(descriptor)
                continue
            if reason := self._too_much(connection, connection.unread(received - read)):
                self._close(connection, *reason)
            elif not connection.heard.messages:
                unheard.append(descriptor)
            is_unsure |= connection.suspect_since >= 0 and not self._came_round(connection)
        for descriptor in unheard[:-MAX_UNHEARD]:
            words = f"more than {MAX_UNHEARD} connections have not sent anything; this is the oldest"
            self._close(self._connections[descriptor], "crowd", words)
        if is_unsure:
            with suppress(BlockingIOError):  # full of questions
                self._ask.send(b"\0")
            self._asked = True
        every_s = LOOK_UNSURE_S if is_unsure or unheard else LOOK_S
        return max(every_s, LOOK_EACH_S * len(self._connections))

    def _came_round(self, connection: Connection) -> bool:
        """Whether all whole messages have been read that had come when there was too much of this connection. (The
        round that ended next may have begun before.)"""
        return self._round > connection.suspect_since + 1

    def _too_much(self, connection: Connection, unread: int) -> tuple[str, str] | None:
        """Reason and words if so much may not be unread of a connection. Whether it is one message without an end is
        known once the reader has come round since there was too much."""
        heard = connection.heard
        if unread <= LITTLE_BYTES:
            connection.suspect_since = -1
            return None
        if connection.suspect_since < 0:
            connection.suspect_since, connection.then = self._round, Heard(heard.messages, heard.num_bytes)
        messages = heard.messages - connection.then.messages
        num_bytes = heard.num_bytes - connection.then.num_bytes
        if self._came_round(connection) and not heard.messages:
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
        connection.socket.shut()  # libzmq sees its end, and frees what it holds
        self._forget(connection.descriptor)
        give_back_memory()

    def _forget(self, descriptor: int) -> Connection | None:
        """What is read from now on in the name of this descriptor counts for its next connection."""
        gone = self._connections.pop(descriptor, None)
        if gone is not None:
            self._heard[descriptor] = Heard()
        return gone


def seed_routing_ids() -> None:
    """Before a ROUTER is made. libzmq 4.3.5 calls a peer without a routing id by a number, counted from a `rand()` that
    it never seeds, and ends the process when another peer has claimed that number."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))
