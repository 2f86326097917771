"""Mutations of valid messages that know the structure of the wire, and the decoder's verdict on what they made.

They change nodes of the header's tree, its bytes, and the frames. Most mutated messages get a correct digest, else the
decoder would stop there.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path

import msgspec

from shared.types import Group
from shared.wire.codec import Limits, WireError, check_trajectory, decode, encode
from tests.support.wires import EXAMPLES, RULES, raw, sealed

LIMITS = Limits(message_bytes=2**20, header_bytes=2**16, frames=64, trajectory_tokens=4096)
SEALED = 0.9
ODD = (
    None, True, False, 0, 1, -1, 2**31, -(2**31), 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, -1.5,
    float("nan"), float("inf"), "", "x", "\x00", "é" * 50, "a" * 5000, b"", b"\xff" * 9, [], {}, [[]], {"a": 1},
    [None] * 300, {str(i): i for i in range(300)}, "completed", "Group", "__class__", "../../etc/passwd",
)  # fmt: skip


def seeds() -> list[list[bytes]]:
    """Valid messages of every kind, as frames."""
    return [raw(encode(message, LIMITS)) for message in EXAMPLES]


def nodes(tree: object) -> list[tuple[list | dict, int | str]]:
    """Every place in a tree, as container and key."""
    found: list[tuple[list | dict, int | str]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            found.append((node, key))  # type: ignore[arg-type]
            waiting.append(value)
    return found


def bend_tree(header: bytes, rng: random.Random) -> bytes:
    """One to three places of the header, most of them in its message, replaced, removed, doubled or exchanged."""
    tree = msgspec.msgpack.decode(header)
    for _ in range(rng.randint(1, 3)):
        places = nodes(tree["message"] if "message" in tree and rng.random() < 0.9 else tree)
        if not places:
            break
        container, key = rng.choice(places)
        value = container[key]  # type: ignore[index]
        match rng.randrange(5):
            case 0 | 1:
                container[key] = deepcopy(rng.choice(ODD))  # type: ignore[index]
            case 2:
                del container[key]  # type: ignore[arg-type]
            case 3 if isinstance(container, list):
                container.insert(rng.randint(0, len(container)), value)
            case 4 if type(value) is int:
                container[key] = max(-(2**63), min(value + rng.choice((-1, 1, 7, -value, 2**20)), 2**63))  # type: ignore[index]
            case _:
                other, place = rng.choice(places)
                if isinstance(other, dict) or place < len(other):  # type: ignore[operator]
                    container[key] = deepcopy(other[place])  # type: ignore[index]
    return msgspec.msgpack.encode(tree)


def bend_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(changed))
        match rng.randrange(4):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del changed[at : at + rng.randint(1, 8)]
            case _:
                changed[at : at + 5] = rng.choice(b"\xdd\xdf\xdb\xc6\xc9\x91\x81").to_bytes() + rng.randbytes(4)
    return bytes(changed)


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    *changed, digest = frames
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            changed[0] = bend_tree(changed[0], rng)
        case 4:
            changed[0] = bend_bytes(changed[0], rng)
        case 5:
            at = rng.randrange(len(changed))
            changed[at] = bend_bytes(changed[at], rng)
        case 6:
            at = rng.randrange(len(changed))
            changed[at : at + rng.randint(0, 1)] = [rng.choice(changed)] * rng.choice((0, 1, 1, 2, 70))
        case _:
            rng.shuffle(changed)
    return sealed(changed) if changed and rng.random() < SEALED else [*changed, digest]


def verdict_of(frames: list[bytes]) -> str:
    """The verdict on a message: "valid KIND", or the reason of its refusal. Any other exception is a defect."""
    try:
        message = decode(frames, LIMITS)
        if isinstance(message, Group):
            for trajectory in message.trajectories:
                check_trajectory(trajectory, RULES)
    except WireError as error:
        assert error.reason and error.reason != "unreadable" and error.detail and len(str(error)) < 10_000
        return error.reason
    decode(raw(encode(message, LIMITS)), LIMITS)
    return f"valid {type(message).__name__}"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(messages: int, seed: int) -> dict[str, object]:
    """Raises what the decoder raises except WireError."""
    rng, valid, verdicts = random.Random(seed), seeds(), Counter[str]()
    slowest, started, settled = 0.0, time.monotonic(), 0
    for number in range(messages):
        frames = mutate(rng.choice(valid), rng)
        began = time.monotonic()
        verdicts[verdict_of(frames)] += 1
        slowest = max(slowest, time.monotonic() - began)
        if number == messages // 10:
            settled = resident_bytes()
    return {
        "messages": messages,
        "seed": seed,
        "refused": sum(count for verdict, count in verdicts.items() if not verdict.startswith("valid")),
        "messages_per_s": round(messages / (time.monotonic() - started)),
        "slowest_s": round(slowest, 4),
        "growth_bytes": resident_bytes() - settled,
        "verdicts": dict(verdicts.most_common()),
    }
