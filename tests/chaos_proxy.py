"""Stands between actors and learner: loses, repeats, delays and damages messages, or cuts the line, for a while."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import zmq

FAULTS = ("lose", "repeat", "delay", "damage", "cut")
IDLE_S = 60.0


@dataclass(order=True)
class Late:
    """A message that waits for its time."""

    due: float
    number: int
    send: Callable[[], None] = field(compare=False)


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
        self._seen: dict[bytes, float] = {}
        self._until: dict[str, float] = dict.fromkeys(FAULTS, 0.0)
        self._late: list[Late] = []
        self._number = 0
        self._stop = False
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def disturb(self, fault: str, seconds: float) -> None:
        self._until[fault] = time.monotonic() + seconds

    def close(self) -> None:
        self._stop = True
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop:
            ready = dict(self._poller.poll(20))
            now = time.monotonic()
            while self._late and self._late[0].due <= now:
                heapq.heappop(self._late).send()
            if self._front in ready:
                self._from_actor(now)
            for peer, line in list(self._lines.items()):
                if line in ready:
                    try:
                        frames = line.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:  # gone with the connection that brought it
                        continue
                    self._pass(frames, partial(self._send, self._front, peer))
                elif now - self._seen[peer] > IDLE_S:
                    self._poller.unregister(line)
                    self._lines.pop(peer).close()
        for socket in (self._front, *self._lines.values()):
            socket.close()
        self._context.term()

    def _from_actor(self, now: float) -> None:
        try:
            peer, *frames = self._front.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        self._seen[peer] = now
        self._pass(frames, partial(self._send, self._line(peer), b""))

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

    def _pass(self, frames: list[bytes], send: Callable[[list[bytes]], None]) -> None:
        now = time.monotonic()
        on = {fault for fault in FAULTS if self._until[fault] > now and (fault == "cut" or self._random.random() < 0.3)}
        for fault in on:
            self.counts[f"messages {fault}"] += 1
        if on & {"cut", "lose"}:
            return
        if "damage" in on:
            place = self._random.randrange(len(frames))
            frame = bytearray(frames[place] or b"\0")
            frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
            frames = [*frames[:place], bytes(frame), *frames[place + 1 :]]
        for _ in range(2 if "repeat" in on else 1):
            if "delay" in on:
                self._number += 1
                due = now + self._random.uniform(0.1, 4.0)
                heapq.heappush(self._late, Late(due, self._number, lambda: send(frames)))
            else:
                send(frames)

    def _send(self, socket: zmq.Socket, peer: bytes, frames: list[bytes]) -> None:
        try:
            if not socket.closed:
                socket.send_multipart([peer, *frames] if peer else frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counts["messages refused by a full queue"] += 1
