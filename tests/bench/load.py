"""Load: 512 simulated actors against one ticket server, with tickets, leases, Receipts and acknowledgments.

    python tests/bench/load.py [--seconds 300] [--actors 512] [--processes 2]

The actors answer each ticket at once with an encoded text group; the learner takes batches and publishes versions but
does not train. The last line is one JSON object: groups/s, CPU of the learner's process for a group, memory at a fifth
of the time and at the end, and the ticket counters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import numpy as np
import zmq

from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import BookSettings
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.types import Group, Hello, Request, Stop, Tickets
from shared.wire.codec import TokenRules, decode, encode
from shared.wire.frames import digest
from tests.bench.transport import trajectory
from tests.fuzz.mutations import resident_bytes

VOCAB, TOKENS = 1000, 128
BEAT_S = 5.0


class Actors:
    """Some actors of one process; each has its own connection. A group is encoded once for each version."""

    def __init__(self, address: str, first: int, count: int, slots: int) -> None:
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, count + 16)
        self.poller = zmq.Poller()
        self.held: dict[zmq.Socket, set[str]] = {}
        self.slots, self.stopped = slots, False
        self.encoded: dict[int, tuple[dict, list]] = {}
        for number in range(first, first + count):
            socket = self.context.socket(zmq.DEALER)
            socket.linger = 0
            socket.routing_id = f"load-{number}#0".encode()
            socket.connect(address)
            self.poller.register(socket, zmq.POLLIN)
            self.held[socket] = set()

    def run(self) -> None:
        began, beats, parent = time.monotonic(), 0, os.getppid()
        turns = itertools.cycle(self.held.items())
        while not self.stopped and os.getppid() == parent:
            for socket, _ in self.poller.poll(50):
                self.hear(socket)
            while beats < (time.monotonic() - began) / BEAT_S * len(self.held):  # spread over the interval
                beats += 1
                socket, held = next(turns)
                socket.send_multipart(encode(Hello("load", ("http://none",), VOCAB, tuple(held))))
                socket.send_multipart(encode(Request(self.slots)))
        self.context.destroy()

    def hear(self, socket: zmq.Socket) -> None:
        held = self.held[socket]
        while not self.stopped:
            try:
                message = decode(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Tickets):
                for ticket in message.tickets:
                    held.add(ticket.id)
                    socket.send_multipart(self.group(ticket.id, ticket.version))
            elif isinstance(message, Stop):
                self.stopped = True
            else:
                held.difference_update(getattr(message, "ticket_ids", ()))

    def group(self, ticket_id: str, version: int) -> list:
        if version not in self.encoded:
            episode = trajectory(TOKENS, 1, 0, 0, np.random.default_rng(0), vocab=VOCAB, version=version)
            frames = encode(Group("", "load", (episode,), 0.1))
            self.encoded = {version: (msgspec.msgpack.decode(frames[0]), frames[1:-1])}
        header, rest = self.encoded[version]
        header["message"]["ticket_id"] = ticket_id
        parts = [msgspec.msgpack.encode(header), *rest]
        return [*parts, digest(parts)]


def play(address: str, first: int, count: int, slots: int) -> None:
    Actors(address, first, count, slots).run()


def learn(ticket_server: TicketServer, seconds: float, per_step: int) -> dict[str, float]:
    """Takes batches for `seconds`; the rate leaves out the first tenth."""
    ticket_server.open()
    started = time.monotonic()
    version, counted, since, early, began = 0, 0, started, 0.0, time.process_time()
    while (now := time.monotonic()) - started < seconds:
        batch = ticket_server.next_batch(per_step, 60.0)
        ticket_server.commit()
        version += 1
        ticket_server.set_version(version)
        ticket_server.metrics()  # as after each step of a run
        if now - started < seconds / 10:
            counted, since, began = 0, time.monotonic(), time.process_time()
        else:
            counted += len(batch)
        if not early and now - started > seconds / 5:
            early = resident_bytes() / 2**20
    return {
        "groups_per_s": counted / (time.monotonic() - since),
        "learner_cpu_us": 1e6 * (time.process_time() - began) / max(1, counted),
        "rss_early_mib": early,
        "rss_end_mib": resident_bytes() / 2**20,
        "versions": version,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--actors", type=int, default=512)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--groups-per-step", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        book = BookSettings(group_size=1, groups_per_version=options.groups_per_step, max_staleness=4)
        settings = TicketServerSettings(
            "tcp://127.0.0.1:*", Path(folder), "load", TokenRules(VOCAB - 1, (), VOCAB), 30.0
        )
        ticket_server = TicketServer(SeedSource(), book, settings)
        share = options.actors // options.processes
        spawn = multiprocessing.get_context("spawn")
        workers = [
            spawn.Process(target=play, args=(ticket_server.address, i * share, share, options.slots), daemon=True)
            for i in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        while ticket_server.metrics()["actors/known"] < share * options.processes:
            time.sleep(0.1)
        result = learn(ticket_server, options.seconds, options.groups_per_step)
        metrics = ticket_server.metrics()
        ticket_server.stop("enough")
        for worker in workers:
            worker.join(10.0)
    counters = {name: metrics[f"tickets/{name}"] for name in ("issued", "trained", "dropped", "open", "reissued")}
    refused = sum(value for name, value in metrics.items() if name.startswith("tickets/refused/"))
    lost = counters["issued"] - counters["trained"] - counters["dropped"] - counters["open"]
    row = {"actors": share * options.processes, "seconds": options.seconds, **result, **counters}
    print(json.dumps({name: round(v, 1) for name, v in row.items()} | {"refused": refused, "lost": lost}))


if __name__ == "__main__":
    main()
