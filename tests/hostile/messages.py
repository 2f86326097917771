"""What a client with an allowed key says to the learner: messages of every kind bent in every way, and groups for real
tickets that no actor would play."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from shared.types import Ending, Group, Hello, Image, Request, Ticket, Tickets, Trajectory, Turn
from shared.wire.auth import use_actor_keys
from shared.wire.codec import SCHEMA_VERSION, Message, TokenRules, WireError, decode, encode
from shared.wire.endpoints import ActorKeys
from tests.fuzz.mutations import mutate
from tests.hostile.attack import Kind
from tests.hostile.images import drawn, hostile
from tests.support.hostile.zmtp import Line
from tests.support.wires import EXAMPLES, changed_header, failed_episode, raw, sealed

URLS = (
    "http://host..domain:30000", "http://[::1", "http://.", f"http://{'a' * 64}.example:1", "http://127.0.0.1:1",
    "http://127.0.0.1:99999", "file:///etc/passwd", "", "http://x" * 50,
)  # fmt: skip
HUGE = (1e30, 1e200, 1.7e308)
TICKETS = 2  # held at once
Make = Callable[[random.Random], list[bytes]]


def connect(context: zmq.Context, address: str, keys: ActorKeys, name: bytes) -> zmq.Socket:
    client = context.socket(zmq.DEALER)
    client.linger, client.sndhwm = 10_000, 16  # closing amid a message can end a process that uses libzmq
    client.reconnect_ivl, client.reconnect_ivl_max = 100, 500
    use_actor_keys(client, keys)
    client.routing_id = name
    client.connect(address)
    return client


# ------------------------------------------------------------------ messages


def nested_lists(rng: random.Random) -> list[bytes]:
    deep = b"\x91" * rng.choice((30, 1000, 100_000)) + b"\xc0"
    places = {"v": deep, "message": deep, "images": deep}
    chosen = rng.choice(list(places))
    good = {"v": msgspec.msgpack.encode(SCHEMA_VERSION), "message": b"\x80", "images": b"\x90"}
    parts = {**good, chosen: deep}
    return sealed([b"\x83" + b"".join(msgspec.msgpack.encode(k) + v for k, v in parts.items())])


def empty_maps(rng: random.Random) -> list[bytes]:
    """A header that unpacks to a hundred times its size."""
    count = rng.choice((2**10, 2**20, 2**22))
    maps = b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count
    kind = msgspec.msgpack.encode(rng.choice(("Hello", "Group", "Tickets", "x")))
    message = b"\x82" + msgspec.msgpack.encode("kind") + kind + msgspec.msgpack.encode("x") + maps
    return sealed([b"\x82" + msgspec.msgpack.encode("v") + b"\x05" + msgspec.msgpack.encode("message") + message])


def many_frames(rng: random.Random) -> list[bytes]:
    return [b"x"] * rng.choice((100, 3000, 70_000))


def large_frames(rng: random.Random) -> list[bytes]:
    """Some just below the limit of a message, some above."""
    return [bytes(rng.choice((2**20, 2**23, 2**24 + 1)))] * rng.choice((1, 1, 3))


def large_texts(rng: random.Random) -> list[bytes]:
    text = "x" * rng.choice((10, 2**16, 2**22 - 1, 2**23))
    hello, group = EXAMPLES[0], EXAMPLES[3]
    places: tuple[tuple[Message, list[Any]], ...] = (
        (group, ["ticket_id"]), (group, ["actor"]), (group, ["trajectories", 0, "text"]),
        (group, ["trajectories", 2, "error"]), (hello, ["actor"]), (hello, ["held"]), (hello, ["engine_urls", 0]),
    )  # fmt: skip
    message, path = rng.choice(places)
    return changed_header(message, path, [text] if path == ["held"] else text)


def odd_hello(vocab_size: int, rng: random.Random) -> list[bytes]:
    held = tuple(f"{n}-x" for n in range(rng.choice((0, 5, 30_000))))
    urls = rng.choices(URLS, k=rng.choice((1, 1, 1500)))
    hello = Hello(rng.choice(("", "a", "\x00\x1b[2J")), ("http://x",), rng.choice((vocab_size, 1)), held)
    return changed_header(hello, ["engine_urls"], urls)


def odd_request(rng: random.Random) -> list[bytes]:
    return raw(encode(Request(rng.choice((0, 1, 2**16)))))


def message_kinds(address: str, keys: ActorKeys, vocab_size: int) -> list[Kind]:
    """Each message comes over a connection of its own, under an odd routing id, and a Bye ends it."""
    context, seeds = zmq.Context(), [raw(encode(message)) for message in EXAMPLES]
    bye = raw(encode(EXAMPLES[2]))

    def send(make: Make, rng: random.Random) -> str | None:
        number = (0x6B8B4567 + rng.randrange(8)).to_bytes(4, "big")  # as libzmq would call a peer, were it not seeded
        name = rng.choice((b"~" + rng.randbytes(8), b"~" + b"\xff" * 249, b"~a#1", "~ü\n".encode(), b"\0" + number))
        with connect(context, address, keys, name) as client:
            for frames in (make(rng), bye):
                with suppress(zmq.Again):
                    client.sndtimeo = 5000
                    client.send_multipart(frames)
            return f"wire: answered by {_kind(client.recv_multipart())}" if client.poll(200) else None

    def mutated(rng: random.Random) -> list[bytes]:
        return mutate(rng.choice(seeds), rng)

    def take_over(rng: random.Random) -> str | None:
        """Asks for tickets, and comes again under the same routing id while they are on their way."""
        asked = [raw(encode(Hello("a", (), vocab_size))), raw(encode(Request(4)))]
        for _ in range(3):
            client = connect(context, address, keys, b"taken#00000000")
            with client:
                client.sndtimeo, client.linger = 5000, 0
                with suppress(zmq.Again):
                    for frames in asked:
                        client.send_multipart(frames)
                client.poll(rng.choice((0, 5, 50, 300)))
        return None

    hello = partial(odd_hello, vocab_size)
    makers: tuple[Make, ...] = (
        nested_lists,
        empty_maps,
        many_frames,
        large_frames,
        large_texts,
        odd_request,
        hello,
        *[mutated] * 6,
    )
    return [take_over, partial(hang_up, context, address, keys, bye[0]), *(partial(send, make) for make in makers)]


def hang_up(context: zmq.Context, address: str, keys: ActorKeys, bye: bytes, rng: random.Random) -> str | None:
    """Many messages and pings of ZeroMQ's, over a line that breaks off while they wait to be read."""
    line = Line(address)
    with context.socket(zmq.DEALER) as client:
        client.linger, client.sndtimeo = 0, 1000
        client.heartbeat_ivl, client.heartbeat_timeout = 1, 60_000
        use_actor_keys(client, keys)
        client.connect(line.address)
        with suppress(zmq.Again):
            for _ in range(rng.choice((100, 1000, 5000))):
                client.send(bye)  # of one part: closing amid a message can end a process that uses libzmq
        line.break_off()
    return None


def _kind(frames: Sequence[bytes]) -> str:
    try:
        return type(decode(frames)).__name__
    except WireError as error:
        return error.reason


# ------------------------------------------------------------------ groups for real tickets


def played(version: int, rules: TokenRules, images: Sequence[Image], **changes: Any) -> Trajectory:
    """An episode that keeps the contract: images, then two sampled tokens."""
    ids = [rules.placeholder_id] * len(images) + [1, 2, 3]
    sampled = np.arange(len(ids)) > len(images)
    fields: dict[str, Any] = {
        "token_ids": np.array(ids, np.int32),
        "loss_mask": sampled.astype(np.uint8),
        "behaviour_logprobs": np.where(sampled, -0.5, 0).astype(np.float32),
        "policy_versions": np.where(sampled, version, -1).astype(np.int32),
        "turns": (Turn(len(images) + 1, len(ids), 0.0),),
        "reward": 0.0,
        "images": tuple(images),
        "ending": Ending.COMPLETED,
    }
    return Trajectory(**(fields | changes))


def group_for(ticket: Ticket, trajectories: Sequence[Trajectory]) -> list[bytes]:
    return raw(encode(Group(ticket.id, "hostile", tuple(trajectories), 0.1)))


class Impostor:
    """An actor with an allowed key that asks for tickets and answers each with what no actor would send."""

    def __init__(self, address: str, keys: ActorKeys, rules: TokenRules) -> None:
        self.rules, self._seen = rules, set[str]()
        self._client = connect(zmq.Context(), address, keys, b"hostile#00000000")

    def kinds(self) -> list[Kind]:
        makers = (self.mutated, self.huge_numbers, self.too_long, self.of_the_future, self.odd_numbers, self.verbose)
        return [partial(self._answer, make) for make in makers]

    def image_kinds(self) -> list[Kind]:
        return [partial(self._answer, self.with_images)]

    def _answer(self, make: Callable[[Ticket, random.Random], list[bytes]], rng: random.Random) -> str | None:
        """Waits for a ticket, and answers it."""
        asked: tuple[Message, ...] = (Hello("hostile", (), self.rules.vocab_size), Request(TICKETS))
        for each in asked:
            self._client.send_multipart(raw(encode(each)), zmq.NOBLOCK)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            if not self._client.poll(200):
                continue
            message = decode(self._client.recv_multipart())
            for ticket in message.tickets if isinstance(message, Tickets) else ():
                self._client.send_multipart(make(ticket, rng), zmq.NOBLOCK)
                return None
        return "tickets: none came"

    # -------------------------------------------------------------- what it makes of a ticket

    def mutated(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        return mutate(group_for(ticket, [self._sound(ticket)] * ticket.group_size), rng)

    def huge_numbers(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        sound = replace(self._sound(ticket), metrics={"success": 0.0})
        group = Group(ticket.id, "hostile", (sound,) * ticket.group_size, 0.1)
        place = rng.choice((["played_s"], ["trajectories", 0, "reward"], ["trajectories", 0, "metrics", "success"]))
        return changed_header(group, place, rng.choice(HUGE))

    def too_long(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        """A small message whose images expand to far more tokens than a context has."""
        image = Image.of(drawn("PNG", *rng.choice(((32, 32), (1000, 1000)))))
        images = [image] * rng.choice((200, 4000))
        return group_for(ticket, [played(ticket.version, self.rules, images)] * ticket.group_size)

    def of_the_future(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        version = rng.choice((ticket.version + 1, ticket.version + 1000, 2**31 - 1, 0))
        return group_for(ticket, [self._sound(ticket, version)] * ticket.group_size)

    def odd_numbers(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        """Too many or too few episodes, empty ones, impossible logprobs and token ids."""
        sound = self._sound(ticket)
        logprobs = np.where(sound.loss_mask == 1, rng.choice((-3e38, -1e30, float("nan"))), 0).astype(np.float32)
        ids = np.where(sound.loss_mask == 1, rng.choice((-1, 2**31 - 1, self.rules.vocab_size)), sound.token_ids)
        made: tuple[list[Trajectory], ...] = (
            [], [sound] * 500, [failed_episode()], [failed_episode()] * ticket.group_size, [sound],
            [replace(sound, behaviour_logprobs=logprobs)] * ticket.group_size,
            [replace(sound, token_ids=ids.astype(np.int32))] * ticket.group_size,
        )  # fmt: skip
        return group_for(ticket, rng.choice(made))

    def verbose(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        text = "x" * rng.choice((2**10, 2**20, 2**22 - 1))
        made = (replace(failed_episode(), error=text), replace(self._sound(ticket), text=text))
        return group_for(ticket, [rng.choice(made)] * ticket.group_size)

    def with_images(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        images = [Image.of(hostile(rng)) for _ in range(rng.choice((1, 1, 3)))]
        return group_for(ticket, [played(ticket.version, self.rules, images)] * ticket.group_size)

    def _sound(self, ticket: Ticket, version: int | None = None) -> Trajectory:
        version = ticket.version if version is None else version
        return played(version, self.rules, [Image.of(drawn("PNG"))])
