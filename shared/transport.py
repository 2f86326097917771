"""The sockets: one ROUTER on the learner's rank 0, one DEALER in each actor. Queues and waits are bounded.

A DEALER's routing id is `NAME#RANDOM`: the name is for people, the random part tells two processes of one name apart.
`secure` is called with each socket before it binds or connects and sets encryption and authentication (see
`shared.auth`); the ZAP handler that it may return is served whenever the socket waits.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import zmq

from shared.auth import HandshakeMonitor, ZapHandler
from shared.codec import Frame, Limits, Message, decode, encode
from shared.guards.connections import ConnectionGuard, seed_routing_ids

SENT_COPY_BYTES = 2**16  # of a frame; a larger one is cheaper to share with ZeroMQ than to copy
RECEIVED_COPY_BYTES = 2**14  # of a frame; a larger one is read where ZeroMQ has put it
SEALED_BYTES = 33  # that CURVE adds to each frame
_AT_ONCE, _MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
Secure = Callable[[zmq.Socket], ZapHandler | None]


class Sent(Enum):
    """What became of a message to a peer."""

    YES = "yes"
    FULL = "full"  # the peer's queue is full, the message is lost
    GONE = "gone"  # there is no connection to the peer


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """Bounds of one socket: a message above `max_message_bytes` is refused, and so is one for a full outgoing queue."""

    max_message_bytes: int = 256 * 2**20
    queue_messages: int = 64
    keepalive_s: float = 10.0  # a connection that leads nowhere for three times as long is closed and made again


DEFAULT_SETTINGS = SocketSettings()


def _prepare(socket: zmq.Socket, settings: SocketSettings, secure: Secure | None) -> ZapHandler | None:
    socket.linger = 0
    socket.sndhwm, socket.maxmsgsize = settings.queue_messages, settings.max_message_bytes
    # libzmq 4.3.5 ends the process when it sends or answers a ping over a connection that broke off while the queue of
    # what came was full (stream_engine_base.cpp, !_io_error): no such bound, no heartbeats of ZeroMQ's own
    socket.rcvhwm = 0
    seconds = max(1, round(settings.keepalive_s))
    socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, seconds
    socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = seconds, 2
    socket.tcp_maxrt = int(3000 * settings.keepalive_s)
    return secure(socket) if secure is not None else None


def _send(socket: zmq.Socket, frames: Sequence[Frame]) -> None:
    """Sends all frames at once; zmq.Again if the queue is full. The flags are plain integers, since pyzmq's
    enumerations cost more than sending a small frame."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=len(frame) < SENT_COPY_BYTES)
    socket.send(frames[-1], _AT_ONCE, copy=len(frames[-1]) < SENT_COPY_BYTES)


class Received(NamedTuple):
    """A message: ZeroMQ's first frame, all frames, and how many bytes all but the first took on the wire."""

    first: zmq.Frame
    frames: list[Frame]
    wire_bytes: int


def _receive(socket: zmq.Socket, limits: Limits, sealed_bytes: int = 0) -> Received | None:
    """One waiting message, its large frames as read-only views of ZeroMQ's memory; None if none is waiting. Of a
    message that is beyond the limits, only so much is kept that it is refused. `sealed_bytes` come with each frame."""
    frames: list[Frame] = []
    room, wire_bytes = limits.message_bytes, 0
    try:
        first = frame = socket.recv(_AT_ONCE, copy=False)
        while True:
            size = len(frame)
            if room >= 0 and len(frames) <= limits.frames + 1:
                frames.append(frame.bytes if size < RECEIVED_COPY_BYTES else frame.buffer.toreadonly())
                room -= size
            if not frame.more:
                return Received(first, frames, wire_bytes)
            frame = socket.recv(_AT_ONCE, copy=False)
            size = len(frame) + sealed_bytes
            wire_bytes += size + (9 if size > 255 else 2)
    except zmq.Again:
        return None


def _opened(action: Callable[[str], object], address: str, field: str, cure: str) -> None:
    port = address.rpartition(":")[2]  # which ZeroMQ takes modulo 65536, and 22x for 22
    if address.startswith("tcp://") and port.strip("*") and not (port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{field} = {address!r}: there is no port {port}; {cure}")
    try:
        action(address)
    except zmq.ZMQError as error:
        raise ValueError(f"{field} = {address!r}: {error}; {cure}") from None


class Router:
    """The learner's end. Not thread-safe: one thread uses it (another one may have made it)."""

    def __init__(self, address: str, settings: SocketSettings = DEFAULT_SETTINGS, secure: Secure | None = None) -> None:
        self._limits = Limits(message_bytes=settings.max_message_bytes)
        self._context = zmq.Context()
        seed_routing_ids()
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._zap: ZapHandler | None = None
        self._guard: ConnectionGuard | None = None
        try:
            self._zap = _prepare(self._socket, settings, secure)
            self._socket.router_mandatory = True  # an unreachable peer is an error, not silence
            self._socket.router_handover = True  # a peer that reconnects replaces its old connection
            note = self._zap.note if self._zap else None
            self._guard = ConnectionGuard(self._socket, settings.max_message_bytes, note)
            cure = "free the port or choose another one (--learner.bind tcp://HOST:PORT)"
            _opened(self._socket.bind, address, "learner.bind", cure)
        except ValueError:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        for source in (self._socket, self._guard.asks.fileno(), *([self._zap.socket] if self._zap else [])):
            self._poller.register(source, zmq.POLLIN)

    def watch(self, file_descriptor: int) -> None:
        """`wait` also returns when this becomes readable."""
        self._poller.register(file_descriptor, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Whether a message is there, after at most `timeout_s`."""
        assert self._guard is not None
        ready = self._poller.poll(math.ceil(1000 * timeout_s))
        here = any(source is self._socket for source, _ in ready)
        if not here:
            self._guard.drained()
        if self._zap is not None:
            self._zap.answer()
        return here

    @property
    def refused(self) -> Counter[str]:
        """By reason: handshakes, messages of actors whose keys have been revoked, connections that were closed for
        what they had sent."""
        counts = Counter(self._zap.refused if self._zap else {})
        counts.update(dict(self._guard.refusals.counts) if self._guard else {})
        return counts

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Peer id and frames of one waiting message, undecoded; None if none is waiting. Messages of keys that are no
        longer allowed are skipped."""
        guard, sealed_bytes = self._guard, SEALED_BYTES if self._zap else 0
        assert guard is not None
        while (received := _receive(self._socket, self._limits, sealed_bytes)) is not None:
            guard.hear(received.first, received.wire_bytes)
            if self._zap is None or self._zap.owns(received.first):
                peer, *frames = received.frames
                return bytes(peer), frames
        guard.drained()
        return None

    def decode(self, frames: Sequence[Frame]) -> Message:
        """Raises WireError."""
        return decode(frames, self._limits)

    def send(self, peer: bytes, message: Message) -> Sent:
        try:
            _send(self._socket, [peer, *encode(message, self._limits)])
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.GONE
            raise
        return Sent.YES

    def close(self, linger_s: float = 0.0) -> None:
        """Gives outgoing messages `linger_s` to leave."""
        if self._guard is not None:
            self._guard.close()
        if self._zap is not None:
            self._zap.close()
        self._socket.close(int(linger_s * 1000))
        self._context.term()


class Dealer:
    """An actor's end, for one asyncio loop. Sending never waits.

    ZeroMQ's file descriptor only tells that something has changed; the socket's events must be read after each use of
    the socket, else the loop misses a message.
    """

    def __init__(
        self, address: str, name: str, settings: SocketSettings = DEFAULT_SETTINGS, secure: Secure | None = None
    ) -> None:
        self.address = address
        self._limits = Limits(message_bytes=settings.max_message_bytes)
        self._patience_s, self._heard = 3 * settings.keepalive_s, time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._handshakes = HandshakeMonitor(self._socket)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        try:
            _prepare(self._socket, settings, secure)
            self._socket.setsockopt(zmq.ROUTING_ID, f"{name[:64]}#{os.urandom(4).hex()}".encode())
            self._socket.immediate = True  # nothing is queued for a learner that is not connected
            self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 100, 2000
            _opened(self._socket.connect, address, "actor.learner", "give the learner's address as tcp://HOST:PORT")
        except ValueError:
            self.close()
            raise

    async def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None after `timeout_s` at most. Raises WireError.

        A message that was there can be gone a moment later, with the connection that brought it. When nothing has come
        for three times `keepalive_s` the connection is made anew: one that something in between keeps open, though it
        leads nowhere, looks like that. (A learner answers each heartbeat.)
        """
        frames = self._waiting()
        if frames is None:
            await self._change(timeout_s)
            frames = self._waiting()
        if frames is None:
            self._handshakes.trouble()  # unread events would pile up
            if time.monotonic() - self._heard > self._patience_s:
                self._connect_anew()
            return None
        self._heard = time.monotonic()
        return decode(frames, self._limits)

    async def send(self, message: Message) -> bool:
        """False: no learner is connected, or the queue is full. Raises WireError for a message that cannot be sent."""
        frames = encode(message, self._limits)
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        finally:
            self._notify()  # a task may wait in `receive`
        return True

    def _connect_anew(self) -> None:
        self._heard = time.monotonic()
        self._socket.disconnect(self.address)
        self._socket.connect(self.address)

    def _waiting(self) -> list[Frame] | None:
        received = _receive(self._socket, self._limits)
        return received and received.frames

    async def _change(self, timeout_s: float) -> None:
        """Waits until a message is there, for `timeout_s` at most."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._notify)
        arrival = self._arrival = self._loop.create_future()
        limit = self._loop.call_later(timeout_s, self._wake)
        try:
            self._notify()
            await arrival
        finally:
            limit.cancel()
            self._arrival = None

    def _notify(self) -> None:
        if self._arrival is not None and int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def trouble(self) -> str:
        """Why the learner refuses this actor, as far as its handshakes tell; "" if none has failed."""
        return self._handshakes.trouble()

    def close(self, linger_s: float = 0.0) -> None:
        """Gives outgoing messages `linger_s` to leave."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        self._handshakes.close()
        self._socket.close(int(linger_s * 1000))
        self._context.term()
