"""A proxy between actors and learner that loses, repeats, delays or damages messages, corrupts groups, or cuts the
line in one direction or both, each for a while. It also knows which actor has come back."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec
import xxhash
import zmq

from learner.tickets.ticket_records import GroupVerdict
from shared.types import TRAINABLE_ENDINGS, Image
from shared.wire.codec import digest

FAULTS = {
    "lost": "messages lost",
    "repeated": "messages repeated",
    "late": "messages delayed",
    "damaged": "messages damaged",
    "corrupt": "groups corrupted",
    "images": "images corrupted",
    "cut": "partition",
    "cut up": "partition towards the learner",
    "cut down": "partition towards the actors",
}
SHARE = 0.3  # of the messages, except where the line is cut
IDLE_S = 60.0


@dataclass(slots=True)
class Peer:
    """One actor process: when it came, when it was heard last, and when its first group went to the learner."""

    name: str
    since: float
    seen: float
    delivered: float = 0.0


class Proxy:
    """One thread. Each actor has a line of its own to the learner, under the actor's own routing id."""

    def __init__(self, learner: str, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._learner = learner
        self._random = random.Random(seed)
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.router_handover = True
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._lines: dict[bytes, zmq.Socket] = {}
        self.peers: dict[bytes, Peer] = {}
        self.tickets_of: dict[bytes, set[int]] = {}  # the numbers under which an episode was sent, by its fingerprint
        self._until: dict[str, float] = dict.fromkeys(FAULTS, 0.0)
        self._delayed: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # two messages that are due together need an order
        self._stop = False
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def disturb(self, fault: str, seconds: float) -> None:
        self._until[fault] = time.monotonic() + seconds

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._stop = True
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop:
            ready, now = dict(self._poller.poll(20)), time.monotonic()
            while self._delayed and self._delayed[0][0] <= now:
                heapq.heappop(self._delayed)[2]()
            if self._front in ready and (frames := _receive(self._front)):
                self._from_actor(frames[0], frames[1:], now)
            for peer, line in list(self._lines.items()):
                if line in ready and (frames := _receive(line)):
                    self.counts["groups refused as outdated"] += is_refusal(frames, GroupVerdict.OUTDATED)
                    self._pass(frames, partial(self._send, self._front, peer), "down")
                elif line not in ready and now - self.peers[peer].seen > IDLE_S:
                    self._poller.unregister(line)
                    self._lines.pop(peer).close()
        for socket in (self._front, *self._lines.values()):
            socket.close()
        self._context.term()

    def _from_actor(self, peer: bytes, frames: list[bytes], now: float) -> None:
        known = self.peers.setdefault(peer, Peer(peer.partition(b"#")[0].decode(), now, now))
        known.seen = now
        if is_group(frames):
            for episode, ticket in fingerprints(frames):
                self.tickets_of.setdefault(episode, set()).add(ticket)
        passed = self._pass(frames, partial(self._send, self._line(peer), b""), "up")
        if passed and is_group(frames) and not known.delivered:
            known.delivered = now

    def _line(self, peer: bytes) -> zmq.Socket:
        if peer not in self._lines:
            line = self._context.socket(zmq.DEALER)
            line.linger = 0
            line.routing_id = peer
            line.reconnect_ivl, line.reconnect_ivl_max = 100, 500
            line.connect(self._learner)
            self._poller.register(line, zmq.POLLIN)
            self._lines[peer] = line
        return self._lines[peer]

    def _pass(self, frames: list[bytes], send: Callable[[list[bytes]], None], way: str) -> bool:
        """Sends a message on, or what the faults of the moment make of it. Returns whether none touched it."""
        now, other_way = time.monotonic(), {"up": "cut down", "down": "cut up"}[way]
        on = {fault for fault in FAULTS if self._until[fault] > now and fault != other_way}
        on = {fault for fault in on if fault.startswith("cut") or self._random.random() < SHARE}
        if not is_group(frames) or len(frames) < 3:
            on -= {"corrupt", "images"}
        self.counts.update(FAULTS[fault] for fault in on)
        if on & {"cut", "cut up", "cut down", "lost"}:
            return False
        if "corrupt" in on:
            frames = corrupted(frames, self._random)
        elif "images" in on:
            frames = with_a_bad_image(frames, self._random)
        if "damaged" in on:
            frames = damaged(frames, self._random)
        for _ in range(2 if "repeated" in on else 1):
            if "late" in on:
                due = now + self._random.uniform(0.1, 4.0)
                heapq.heappush(self._delayed, (due, next(self._numbers), partial(send, frames)))
            else:
                send(frames)
        return not on

    def _send(self, socket: zmq.Socket, peer: bytes, frames: list[bytes]) -> None:
        try:
            if not socket.closed:
                socket.send_multipart([peer, *frames] if peer else frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counts["messages refused by a full queue"] += 1


def _receive(socket: zmq.Socket) -> list[bytes]:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:  # the message went with its connection
        return []


def is_group(frames: list[bytes]) -> bool:
    """By the name at the beginning of the header."""
    return b"Group" in frames[0][:24]


def is_refusal(frames: list[bytes], verdict: GroupVerdict) -> bool:
    return b"Refusal" in frames[0][:32] and verdict.value.encode() in frames[0]


def damaged(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """The same with one bit flipped."""
    place = rng.randrange(len(frames))
    frame = bytearray(frames[place] or b"\0")
    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [*frames[:place], bytes(frame), *frames[place + 1 :]]


def corrupted(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """A group as a broken actor would make it, with a correct digest: its arrays are in another order, or one of them
    is cut short, missing, repeated, or all ones."""
    head, num_images = frames[0], len(msgspec.msgpack.decode(frames[0])["images"])
    end = len(frames) - 1 - num_images
    parts, images = frames[1:end], frames[end:-1]
    if not parts:
        return frames
    place = rng.randrange(len(parts))
    part = parts[place]
    match rng.randrange(5):
        case 0:
            rng.shuffle(parts)
        case 1:
            parts[place] = part[: len(part) // 2]
        case 2:
            del parts[place]
        case 3:
            parts.insert(place, part)
        case _:
            parts[place] = b"\xff" * len(part)
    return [head, *parts, *images, bytes(digest([head, *parts]))]


def with_a_bad_image(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """The group with one of its images cut off or overwritten, under the hash of what it is now."""
    header = msgspec.msgpack.decode(frames[0])
    num_images = len(header["images"])
    if not num_images:
        return frames
    parts, images = frames[1 : len(frames) - 1 - num_images], frames[len(frames) - 1 - num_images : -1]
    row = rng.randrange(num_images)
    data = bytearray(images[row])
    if rng.random() < 0.5:
        data = data[: rng.randrange(len(data) + 1)]
    else:
        data[rng.randrange(len(data)) :] = rng.randbytes(rng.randint(1, 200))
    images[row] = bytes(data)
    header["images"][row] = Image.of(bytes(data)).content_hash
    head = msgspec.msgpack.encode(header)
    return [head, *parts, *images, bytes(digest([head, *parts]))]


def fingerprints(frames: list[bytes]) -> list[tuple[bytes, int]]:
    """Of each trainable episode of a group, with its ticket's number. An episode's metrics hold how long each part of
    it took, so that no two have the same."""
    try:
        message = msgspec.msgpack.decode(frames[0])["message"]
        number = int(str(message["ticket_id"]).partition("-")[0])
        found = []
        for place, episode in enumerate(message["trajectories"]):
            if episode["ending"] in TRAINABLE_ENDINGS and episode.get("metrics"):
                arrays = frames[1 + 4 * place : 5 + 4 * place]
                whole = b"".join([msgspec.msgpack.encode(episode), *arrays])
                found.append((xxhash.xxh3_128_digest(whole), number))
        return found
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return []
