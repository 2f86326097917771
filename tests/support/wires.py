"""Small records for tests of the wire: a message of every kind, messages with one field changed, ticket servers and
actors on a free port."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from actor.actor_loop import ActorSettings
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import BookSettings
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.types import (
    Ack,
    AgreedSetting,
    Bye,
    Cancel,
    Ending,
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
    Trajectory,
    Turn,
    Welcome,
)
from shared.wire.codec import SCHEMA_VERSION, TokenRules, encode
from shared.wire.frames import Frame, digest

PLACEHOLDER, VISION_START, VOCAB = 7, 8, 100
RULES = TokenRules(PLACEHOLDER, (PLACEHOLDER, VISION_START), VOCAB)


def episode(version: int = 0, *, reward: float = 1.0, image: bytes = b"an image", **changes: object) -> Trajectory:
    """Return an episode of two turns after one image: 2 tokens and 1 token, all sampled by `version`."""
    fields: dict[str, object] = {
        "token_ids": np.array([1, PLACEHOLDER, 2, 3, 4, 5, 6], np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 0, 0, 1], np.uint8),
        "behaviour_logprobs": np.array([0, 0, -0.5, -1.5, 0, 0, -2], np.float32),
        "policy_versions": np.array([-1, -1, version, version, -1, -1, version], np.int32),
        "turns": (Turn(2, 4, 0.0), Turn(6, 7, reward)),
        "reward": reward,
        "images": (Image.of(image),),
        "ending": Ending.COMPLETED,
        "metrics": {"success": reward},
        "text": "up, left",
    }
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


def failed_episode(ending: Ending = Ending.ENV_ERROR, error: str = "boom") -> Trajectory:
    ids, mask, logprobs = (np.empty(0, dtype) for dtype in (np.int32, np.uint8, np.float32))
    return Trajectory(ids, mask, logprobs, ids, (), 0.0, (), ending, error=error)


def sealed(frames: Sequence[Frame]) -> list[bytes]:
    """Return these frames (header, arrays, images) with a correct digest appended, even if their content is invalid."""
    raw = [bytes(frame) for frame in frames]
    try:
        hashes = msgspec.msgpack.decode(raw[0])["images"]
        num_images = len(hashes) if len(hashes) < len(raw) else 0
    except (IndexError, TypeError, KeyError, ValueError, RecursionError, msgspec.MsgspecError):
        num_images = 0
    return [*raw, digest(raw[: len(raw) - num_images])]


def group_of(ticket: Ticket, version: int | None = None) -> Group:
    made = episode(ticket.version if version is None else version)
    return Group(ticket.id, "tester", (made,) * ticket.group_size, 0.1)


def book_settings(**changes: object) -> BookSettings:
    return BookSettings(**({"group_size": 1, "groups_per_version": 4, "max_staleness": 1} | changes))  # type: ignore[arg-type]


def start_ticket_server(
    tmp: Path, *, address: str = "tcp://127.0.0.1:*", timeout_s: float = 10.0, **book: object
) -> TicketServer:
    settings = TicketServerSettings(address, tmp, "run-1", RULES, actor_timeout_s=timeout_s, keep_failed=2)
    return TicketServer(SeedSource(), book_settings(**book), settings)


def actor_settings(learner: str, name: str = "a", **changes: object) -> ActorSettings:
    fields = {"name": name, "learner": learner, "engine_urls": (f"http://engine-of-{name}",), "rules": RULES}
    waits = {"heartbeat_s": 0.1, "connect_timeout_s": 5.0, "reconnect_timeout_s": 5.0}
    return ActorSettings(**(fields | waits | {"groups": 3} | changes))  # type: ignore[arg-type]


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
    Hello("a", ("http://x:1", "http://y:2"), 100, ("0-a", "1-a"), 0.25, {"env.max_turns": AgreedSetting("8")}),
    Request(3),
    Bye("done"),
    GROUP,
    Welcome("run", 4, "p", ("http://x:1", "http://[::1]:2/way")),
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
    """Return the frames of `message` with the value at `path` in its fields replaced, and with a matching digest."""
    frames = raw(encode(message))  # type: ignore[arg-type]
    header = msgspec.msgpack.decode(frames[0])
    place = header["message"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return with_header(header, *frames[1:-1])


def with_header(header: dict, *frames: bytes) -> list[bytes]:
    return sealed([msgspec.msgpack.encode(header), *frames])
