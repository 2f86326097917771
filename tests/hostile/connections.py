"""What comes to the ticket socket before authentication: bytes that are no handshake, handshakes that never end, and
clients without an allowed key."""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from shared.wire.auth import use_actor_keys
from shared.wire.endpoints import ActorKeys
from tests.hostile.attack import Kind

TIMEOUT_S = 10.0
HELD = 12  # connections that stay open at once, and never go on
UNFINISHED_BYTES = 2**23


def greeting(mechanism: bytes, version: bytes = b"\x03\x01") -> bytes:
    """The first 64 bytes of ZMTP."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def command(name: bytes, body: bytes, *, length: int | None = None) -> bytes:
    """A long command frame; `length` is what it claims to hold, beside what it does."""
    content = bytes([len(name)]) + name + body
    return b"\x06" + (len(content) if length is None else length).to_bytes(8, "big") + content


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 10, 64, 1000, 100_000)))


def another_protocol(rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(500),
            b"SSH-2.0-x\r\n",
        )
    )


def half_a_greeting(rng: random.Random) -> bytes:
    whole = greeting(
        rng.choice((b"CURVE", b"NULL", b"PLAIN", b"\xff" * 20)), rng.choice((b"\x03\x00", b"\x03\x01", b"\xff\xff"))
    )
    return whole[: rng.randrange(1, 65)]


def wrong_handshake(rng: random.Random) -> bytes:
    body = rng.randbytes(rng.choice((0, 1, 194, 194, 300, 5000)))
    return greeting(b"CURVE") + command(rng.choice((b"HELLO", b"INITIATE", b"READY", b"ERROR", b"x" * 200)), body)


def endless_handshake(rng: random.Random) -> bytes:
    """A command frame that claims much and brings a part of it."""
    claimed = rng.choice((2**24 - 1, 2**28 - 1, 2**31, 2**63 - 1))
    return greeting(b"CURVE") + command(b"HELLO", bytes(rng.randrange(UNFINISHED_BYTES)), length=claimed)


def kinds(address: str) -> list[Kind]:
    """Connections to `address` that say one of these; the last ones stay open without another word."""
    host, port = address.removeprefix("tcp://").split(":")
    held: deque[socket.socket] = deque()

    def say(what: Callable[[random.Random], bytes], rng: random.Random) -> str | None:
        connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        try:
            connection.sendall(what(rng))
        except OSError:
            connection.close()
            return "connection: closed by the learner"
        if rng.random() < 0.5:
            held.append(connection)
            if len(held) > HELD:
                held.popleft().close()
        else:
            connection.close()
        return None

    return [partial(say, w) for w in (noise, another_protocol, half_a_greeting, wrong_handshake, endless_handshake)]


def stranger_kinds(address: str, learner_key: bytes, frames: list[list[bytes]]) -> list[Kind]:
    """ZeroMQ clients without keys, with a key that nobody allows, with another learner's, or by name and password; each
    sends `frames` all the same."""
    context = zmq.Context()

    def join(keys: ActorKeys | None, password: bool, rng: random.Random) -> str | None:
        with context.socket(zmq.DEALER) as client:
            client.linger = 0
            if keys is not None:
                use_actor_keys(client, keys)
            if password:
                client.plain_username, client.plain_password = b"root", b"x" * rng.choice((0, 8, 200))
            client.connect(address)
            client.poll(300)
            for each in rng.choices(frames, k=5):
                try:
                    client.send_multipart(each, zmq.NOBLOCK)
                except zmq.Again:
                    break
            return "SERVED" if client.poll(300) else "not served"

    def unknown(rng: random.Random) -> str | None:
        return join(ActorKeys(*zmq.curve_keypair(), learner_key), False, rng)

    def mistaken(rng: random.Random) -> str | None:
        return join(ActorKeys(*zmq.curve_keypair(), zmq.curve_keypair()[0]), False, rng)

    return [partial(join, None, False), partial(join, None, True), unknown, mistaken]
