"""What the wire costs: trajectories with images through codec, sockets and all checks, beside a bare pyzmq loop.

    python tests/bench/transport.py [--rounds 7] [--mib 256]

One process sends, one receives, over TCP on loopback. `pronk` is an actor's `Dealer` against the learner's `Router` and
`TicketProtocol.read`: encoded, decoded, checked, answered by Receipts as the ticket server sends them. `bare` is a
DEALER against a ROUTER that moves the same frames and answers each unread. Both keep as many groups under way as an
actor plays at once. The two take turns; a row holds the medians of the rounds, the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import zmq

from learner.tickets.protocol import TicketProtocol, TicketServerSettings
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import BookSettings, TicketBook
from shared.types import Ending, Group, Image, Receipt, Trajectory, Turn
from shared.wire.codec import TokenRules, encode
from shared.wire.zeromq import Dealer, Router

PLACEHOLDER, VOCAB = 1, 151_936
UNDER_WAY = 16
DIFFERENT = 8  # trajectories, sent in turn
WAIT_S = 60.0
SIZES = {  # name: (tokens, turns, images, bytes of an image)
    "74 KB": (4096, 3, 1, 20_000),  # a long answer about one diagram, as of geo3k in several turns
    "400 KB": (8192, 8, 8, 36_000),  # an image before each of eight turns, as of Sokoban, and a full context
    "4 MB": (8192, 8, 8, 486_000),  # the same with photographs
}


def trajectory(
    tokens: int, turns: int, images: int, size: int, rng: np.random.Generator, *, vocab: int = VOCAB, version: int = 3
) -> Trajectory:
    """Turns of equal length, the first ones after an image; half of each turn's tokens are sampled."""
    span = tokens // turns
    mask = np.tile(np.repeat(np.array([0, 1], np.uint8), [span - span // 2, span // 2]), turns)
    ids = rng.integers(2, vocab - 1, len(mask), dtype=np.int32)
    ids[: span * images : span] = PLACEHOLDER
    ends = range(span, len(mask) + 1, span)
    return Trajectory(
        token_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -rng.random(len(mask)), 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        turns=tuple(Turn(end - span // 2, end, 0.5) for end in ends),
        reward=1.0,
        images=tuple(Image.of(rng.bytes(size)) for _ in range(images)),
        ending=Ending.COMPLETED,
        metrics={"success": 1.0},
        text="an answer " * 20,
    )


def groups_of(size: str) -> list[Group]:
    rng = np.random.default_rng(0)
    made = [trajectory(*SIZES[size], rng) for _ in range(DIFFERENT)]
    return [Group(f"{i}-abcdef01", "bench", (one,), 1.0) for i, one in enumerate(made)]


# ------------------------------------------------------------------ the sending process


def send_bare(socket: zmq.Socket, messages: list[list], count: int) -> None:
    sent = answered = 0
    while answered < count:
        while sent < count and sent - answered < UNDER_WAY:
            socket.send_multipart(messages[sent % DIFFERENT], copy=False)
            sent += 1
        socket.recv_multipart()
        answered += 1


async def send_pronk(dealer: Dealer, groups: list[Group], count: int) -> None:
    sent = answered = 0
    while answered < count:
        while sent < count and sent - answered < UNDER_WAY and await dealer.send(groups[sent % DIFFERENT]):
            sent += 1
        receipt = await dealer.receive(WAIT_S)
        if not isinstance(receipt, Receipt):
            raise TimeoutError(f"{receipt} for {sent - answered} groups within {WAIT_S:g} s")
        answered += len(receipt.ticket_ids)


async def send(bare_address: str, address: str, orders: Connection) -> None:
    """Executes each order (side, size, messages)."""
    bare = zmq.Context().socket(zmq.DEALER)
    bare.connect(bare_address)
    bare.rcvtimeo = int(WAIT_S * 1000)
    dealer = Dealer(address, "bench")
    groups = {size: groups_of(size) for size in SIZES}
    frames = {size: [encode(group) for group in made] for size, made in groups.items()}
    while not await dealer.send(groups["74 KB"][0]):  # connected
        await asyncio.sleep(0.01)
    await dealer.receive(WAIT_S)
    orders.send("ready")
    while order := orders.recv():
        side, size, count = order
        began = time.process_time()
        if side == "bare":
            send_bare(bare, frames[size], count)
        else:
            await send_pronk(dealer, groups[size], count)
        orders.send(time.process_time() - began)
    dealer.close()
    bare.close(0)


def sender(bare_address: str, address: str, orders: Connection) -> None:
    asyncio.run(send(bare_address, address, orders))


# ------------------------------------------------------------------ the receiving process


def receive_bare(router: zmq.Socket, count: int) -> None:
    answer = encode(Receipt(("12345-abcdef01",)))
    for _ in range(count):
        peer, *_ = router.recv_multipart()
        router.send_multipart([peer, *answer])


def receive_pronk(router: Router, protocol: TicketProtocol, count: int) -> None:
    """As the ticket server's thread: waits, then reads what is there."""
    got, came = 0, time.monotonic()
    while got < count:
        if router.wait(1.0):  # else the guard of its connections may have asked for a look
            came = time.monotonic()
        elif time.monotonic() - came > WAIT_S:
            raise TimeoutError(f"group {got} of {count} did not come within {WAIT_S:g} s")
        while got < count and (received := router.receive()) is not None:
            peer, frames = received
            message = protocol.read(frames)
            if not isinstance(message, Group):
                raise message if isinstance(message, Exception) else TypeError(message)
            protocol.confirm(peer, message.ticket_id)
            got += 1
        protocol.confirm_all()


def new_protocol(router: Router, folder: Path) -> TicketProtocol:
    book = TicketBook(SeedSource(), BookSettings(group_size=1, groups_per_version=1, max_staleness=1), nonce="abcdef01")
    rules = TokenRules(PLACEHOLDER, (PLACEHOLDER,), VOCAB)
    return TicketProtocol(router, book, TicketServerSettings("", folder, "bench", rules, WAIT_S))


def measure(
    bare: zmq.Socket, router: Router, protocol: TicketProtocol, orders: Connection, rounds: int, mib: int
) -> list:
    """One row for each size: bytes, MB/s and CPU µs (of both processes) of a message, ratios of neighbouring rounds."""
    rows = []
    for size in SIZES:
        message_bytes = sum(len(frame) for frame in encode(groups_of(size)[0]))
        count = max(UNDER_WAY, mib * 2**20 // message_bytes)
        rates: dict[str, list[float]] = {"bare": [], "pronk": []}
        cpu: dict[str, list[float]] = {"bare": [], "pronk": []}
        for number in range(rounds + 1):
            for side in ("bare", "pronk") if number % 2 else ("pronk", "bare"):
                started, began = time.perf_counter(), time.process_time()
                orders.send((side, size, count))
                if side == "bare":
                    receive_bare(bare, count)
                else:
                    receive_pronk(router, protocol, count)
                cpu_s = orders.recv() + time.process_time() - began
                if number:  # the first round warms up
                    rates[side].append(count * message_bytes / 1e6 / (time.perf_counter() - started))
                    cpu[side].append(cpu_s / count * 1e6)
        ratios = [p / b for p, b in zip(rates["pronk"], rates["bare"], strict=True)]
        row = {"size": size, "bytes": message_bytes}
        row |= {f"{side}_mb_s": round(statistics.median(values)) for side, values in rates.items()}
        row |= {f"{side}_cpu_us": round(statistics.median(values)) for side, values in cpu.items()}
        row |= {"ratio": round(statistics.median(ratios), 3)}
        rows.append(row | {"ratio_lowest": round(min(ratios), 2), "ratio_highest": round(max(ratios), 2)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="moved in each round by each side")
    options = parser.parse_args()
    bare = zmq.Context().socket(zmq.ROUTER)
    bare.rcvtimeo = int(WAIT_S * 1000)
    bare_address = f"tcp://127.0.0.1:{bare.bind_to_random_port('tcp://127.0.0.1')}"
    router = Router("tcp://127.0.0.1:*")
    orders, theirs = multiprocessing.Pipe()
    start = multiprocessing.get_context("spawn").Process
    child = start(target=sender, args=(bare_address, router.address, theirs), daemon=True)
    child.start()
    with tempfile.TemporaryDirectory() as folder:
        protocol = new_protocol(router, Path(folder))
        receive_pronk(router, protocol, 1)
        assert orders.recv() == "ready"
        rows = measure(bare, router, protocol, orders, options.rounds, options.mib)
    orders.send(None)
    child.join(10.0)
    bare.close(0)
    router.close()
    print(json.dumps({"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "rows": rows}))


if __name__ == "__main__":
    main()
