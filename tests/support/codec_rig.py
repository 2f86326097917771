"""A message of every kind, and messages with one place changed."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from shared.codec import SCHEMA_VERSION, encode
from shared.types import (
    Ack,
    Bye,
    Cancel,
    Group,
    Hello,
    Image,
    Receipt,
    Refusal,
    Request,
    Sample,
    Sampling,
    Stop,
    Ticket,
    Tickets,
    Welcome,
)
from tests.support.wires import episode, failed_episode, sealed

SAMPLE = Sample(
    "s",
    ({"role": "system", "content": [{"type": "text", "text": "größe"}, {"type": "image"}]},),
    (Image.of(b"x"),),
    None,
    {"seed": 2**40, "nested": {"f": 0.5, "n": None, "b": True}},
)
TICKET = Ticket("0-a", SAMPLE, 2, 3, Sampling(0.7, 0.9, 50, 12), 30.0, "eval", 5)
GROUP = Group("0-a", "actor", (episode(image=b"one"), episode(2), failed_episode()), 1.5)
STOP = {"v": SCHEMA_VERSION, "message": {"kind": "Stop", "reason": "x"}, "images": []}
EXAMPLES = [
    Hello("a", ("http://x:1", "http://y:2"), 100, ("0-a", "1-a"), 0.25),
    Request(3),
    Bye("done"),
    GROUP,
    Welcome("run", 4, "p"),
    Tickets((TICKET, replace(TICKET, evaluation=""))),
    Receipt(("0-a", "1-a")),
    Refusal("0-a", "stale"),
    Ack(("0-a", "1-a")),
    Cancel(("0-a",), "void"),
    Stop("over"),
]


def raw(frames: list) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def changed_header(message: object, path: list, value: object) -> list[bytes]:
    """The frames of `message` with one place of its fields replaced, and the digest of what is there now."""
    frames = raw(encode(message))  # type: ignore[arg-type]
    header = msgspec.msgpack.decode(frames[0])
    place = header["message"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return with_header(header, *frames[1:-1])


def with_header(header: dict, *frames: bytes) -> list[bytes]:
    return sealed([msgspec.msgpack.encode(header), *frames])
