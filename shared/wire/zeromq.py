"""ZeroMQ's sockets: one ROUTER on the learner's rank 0, one DEALER in each actor. Queues and waits are bounded.

A DEALER's routing id is `NAME#RANDOM`: the name is for people, the random part distinguishes two processes with the
same name. Keys are set before a socket binds or connects; the ROUTER's ZAP handler (see `shared.wire.auth`) is served
whenever it waits.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq

from shared.wire.auth import HandshakeMonitor, ZapHandler, use_actor_keys, use_learner_keys
from shared.wire.codec import Frame, Limits, Message, decode, encode
from shared.wire.connections import ConnectionGuard, seed_routing_ids
from shared.wire.endpoints import DEFAULT_SETTINGS, ActorKeys, Delivery, EndpointSettings, LearnerKeys

SENT_COPY_BYTES = 2**16  # frames below are copied; larger ones are cheaper to share with ZeroMQ
RECEIVED_COPY_BYTES = 2**14  # frames below are copied; larger ones stay in ZeroMQ's memory
SEALED_BYTES = 33  # bytes that CURVE adds to each frame
_AT_ONCE, _MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)


def _set_bounds(socket: zmq.Socket, settings: EndpointSettings) -> None:
    socket.linger = 0
    socket.sndhwm = settings.queue_messages
    socket.maxmsgsize = settings.max_message_bytes
    # libzmq 4.3.5 ends the process when it sends or answers a ping over a connection that broke off while the queue of
    # received messages was full (stream_engine_base.cpp, !_io_error). So this queue has no bound, and ZeroMQ's own
    # heartbeats are off.
    socket.rcvhwm = 0
    seconds = max(1, round(settings.keepalive_s))
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = seconds
    socket.tcp_keepalive_intvl = seconds
    socket.tcp_keepalive_cnt = 2
    socket.tcp_maxrt = int(3000 * settings.keepalive_s)


def _send(socket: zmq.Socket, frames: Sequence[Frame]) -> None:
    """Send all frames at once. Raise zmq.Again if the queue is full. The flags are plain integers, since pyzmq's
    enumerations cost more than sending a small frame."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=len(frame) < SENT_COPY_BYTES)
    socket.send(frames[-1], _AT_ONCE, copy=len(frames[-1]) < SENT_COPY_BYTES)


class Received(NamedTuple):
    """A received message: ZeroMQ's first frame, all frames, and the bytes on the wire of all frames but the first."""

    first: zmq.Frame
    frames: list[Frame]
    wire_bytes: int


def _receive(socket: zmq.Socket, limits: Limits, sealed_bytes: int = 0) -> Received | None:
    """Return one waiting message, its large frames as read-only views of ZeroMQ's memory; None if none is waiting. Of a
    message beyond the limits keep only so much that it is refused as too large. `sealed_bytes`: what encryption adds to
    each frame."""
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


def _open(action: Callable[[str], object], address: str, field: str, cure: str) -> None:
    port = address.rpartition(":")[2]  # ZeroMQ would take it modulo 65536, and read 22x as 22
    if address.startswith("tcp://") and port.strip("*") and not (port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{field} = {address!r}: there is no port {port}; {cure}")
    try:
        action(address)
    except zmq.ZMQError as error:
        raise ValueError(f"{field} = {address!r}: {error}; {cure}") from None


class Router:
    """The learner's end. Only `wake` is thread-safe: one thread uses everything else (another thread may have made the
    object)."""

    def __init__(
        self, address: str, settings: EndpointSettings = DEFAULT_SETTINGS, keys: LearnerKeys | None = None
    ) -> None:
        self.limits = Limits(message_bytes=settings.max_message_bytes)
        self._context = zmq.Context()
        seed_routing_ids()
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._zap: ZapHandler | None = None
        self._guard: ConnectionGuard | None = None
        self._waking, self._wake = socket.socketpair()
        for end in (self._waking, self._wake):
            end.setblocking(False)
        try:
            _set_bounds(self._socket, settings)
            self._zap = use_learner_keys(self._socket, keys) if keys is not None else None
            self._socket.router_mandatory = True  # an unreachable peer is an error, not silence
            self._socket.router_handover = True  # a peer that reconnects replaces its old connection
            note = self._zap.note if self._zap else None
            self._guard = ConnectionGuard(self._socket, settings.max_message_bytes, note)
            cure = "free the port or choose another one (--learner.bind tcp://HOST:PORT)"
            _open(self._socket.bind, address, "learner.bind", cure)
        except ValueError:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        sources = [self._socket, self._guard.asks.fileno(), self._waking.fileno()]
        for source in (*sources, *([self._zap.socket] if self._zap else [])):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message or a call of `wake`, for at most `timeout_s`; tell whether a message is there. Answer
        handshakes that are waiting."""
        assert self._guard is not None
        ready = self._poller.poll(math.ceil(1000 * timeout_s))
        has_message = any(source is self._socket for source, _ in ready)
        if not has_message:
            self._guard.drained()
        if self._zap is not None:
            self._zap.answer()
        with suppress(BlockingIOError):
            self._waking.recv(4096)
        return has_message

    def wake(self) -> None:
        """End the running `wait` soon, or the next one at once. Any thread may call this, even after `close`."""
        with suppress(OSError):  # full: the thread wakes anyway; closed: there is nothing to wake
            self._wake.send(b"\0")

    @property
    def refused(self) -> Counter[str]:
        """Counts by reason: refused handshakes, messages of actors whose keys have been revoked, and connections that
        the guard has closed."""
        counts = Counter(self._zap.refused if self._zap else {})
        counts.update(dict(self._guard.refusals.counts) if self._guard else {})
        return counts

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Return the peer and the frames of one waiting message, still encoded; None if none is waiting. Skip messages
        of actors whose keys are no longer allowed."""
        guard, sealed_bytes = self._guard, SEALED_BYTES if self._zap else 0
        assert guard is not None
        while (received := _receive(self._socket, self.limits, sealed_bytes)) is not None:
            guard.count_read(received.first, received.wire_bytes)
            if self._zap is None or self._zap.is_allowed(received.first):
                peer, *frames = received.frames
                return bytes(peer), frames
        guard.drained()
        return None

    def send(self, peer: bytes, message: Message) -> Delivery:
        """Send without waiting. Raise WireError for a message that cannot be sent."""
        try:
            _send(self._socket, [peer, *encode(message, self.limits)])
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.SENT

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self._zap is not None:
            self._zap.close()
        self._socket.close(0)
        self._context.term()
        self._waking.close()
        self._wake.close()


class Dealer:
    """An actor's end, for one asyncio loop. Sending never waits.

    ZeroMQ's file descriptor only signals that something has changed. The socket's events must be read after each use of
    the socket; else the loop misses a message.
    """

    def __init__(
        self, address: str, name: str, settings: EndpointSettings = DEFAULT_SETTINGS, keys: ActorKeys | None = None
    ) -> None:
        self.address = address
        self._limits = Limits(message_bytes=settings.max_message_bytes)
        self._silence_limit_s = 3 * settings.keepalive_s
        self._last_received = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._handshakes = HandshakeMonitor(self._socket)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        try:
            _set_bounds(self._socket, settings)
            if keys is not None:
                use_actor_keys(self._socket, keys)
            self._socket.setsockopt(zmq.ROUTING_ID, f"{name[:64]}#{os.urandom(4).hex()}".encode())
            self._socket.immediate = True  # nothing is queued for a learner that is not connected
            self._socket.reconnect_ivl = 100
            self._socket.reconnect_ivl_max = 2000
            _open(self._socket.connect, address, "actor.learner", "give the learner's address as tcp://HOST:PORT")
        except ValueError:
            self.close()
            raise

    async def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, or None after `timeout_s` at most. Raise WireError for a message that breaks the
        contract. None can be returned early: a waiting message disappears when its connection ends. When nothing was
        received for three times `keepalive_s`, the connection is made anew: a learner answers each heartbeat, so that
        silence means a dead connection that something in between keeps open.
        """
        frames = self._waiting()
        if frames is None:
            await self._change(timeout_s)
            frames = self._waiting()
        if frames is None:
            self._handshakes.trouble()  # unread events would pile up
            if time.monotonic() - self._last_received > self._silence_limit_s:
                self._reconnect()
            return None
        self._last_received = time.monotonic()
        return decode(frames, self._limits)

    async def send(self, message: Message) -> bool:
        """Send without waiting; return False if no learner is connected or the queue is full. Raise WireError for a
        message that cannot be sent."""
        frames = encode(message, self._limits)
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        finally:
            self._notify()  # a task may wait in `receive`
        return True

    def _reconnect(self) -> None:
        self._last_received = time.monotonic()
        self._socket.disconnect(self.address)
        self._socket.connect(self.address)

    def _waiting(self) -> list[Frame] | None:
        received = _receive(self._socket, self._limits)
        return received and received.frames

    async def _change(self, timeout_s: float) -> None:
        """Wait for a message, at most `timeout_s`."""
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
        """Return why the learner refuses this actor, as far as its handshakes show it; "" if none has failed."""
        return self._handshakes.trouble()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; give outgoing messages `linger_s` to leave."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
        self._handshakes.close()
        self._socket.close(int(linger_s * 1000))
        self._context.term()
