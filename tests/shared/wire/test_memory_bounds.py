"""What hostile senders can make a process hold, by its resident memory.

docs/explanation/security.md names each bound.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from shared.keys import make_keys
from shared.types import Welcome
from shared.wire.zeromq import Router
from tests.support.hostile.memory import MIB, forget_peak, growth_of, resident_bytes
from tests.support.hostile.zmtp import COMMAND, MORE, connected, head, message, pour
from tests.support.machine import until
from tests.support.tickets.server_rig import Peer
from tests.support.wires import STOP, sealed

POURED = 2**31  # bytes of each endless message


class Server:
    """A ticket server in its own process, with messages of at most 32 MiB."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.support.hostile.server", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self._before = forget_peak(self.process.pid)

    def grown_mib(self) -> float:
        """At its highest, since the start."""
        return (resident_bytes(self.process.pid, "VmHWM") - self._before) / MIB

    def metrics(self) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def plain(tmp_path: Path, stack: ExitStack) -> Server:
    server = Server(str(tmp_path))
    stack.callback(server.close)
    return server


def is_served(server: Server, stack: ExitStack) -> bool:
    peer = Peer(server.address, "honest")
    stack.callback(peer.close)
    peer.hello()
    return len(peer.tickets(1)) > 0


def attack(server: Server, mechanism: bytes, opening: bytes, data: bytes, connections: int, most: int) -> list[int]:
    """What each of several connections got rid of."""
    sent: list[int] = []

    def one() -> None:
        with connected(server.address, mechanism) as connection:
            connection.sendall(opening)
            sent.append(pour(connection, data, most))

    threads = [threading.Thread(target=one) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sent


def closed(server: Server, reason: str) -> float:
    """Connections that were closed for this reason, or before the reader could tell it from a flood of whole messages:
    a fast line brings 80 MB between two looks."""
    metrics = server.metrics()
    return sum(metrics.get(f"wire/refused_connections/{name}", 0) for name in (reason, "flood"))


@pytest.mark.slow
def test_unfinished_handshakes_take_little_and_are_closed(tmp_path: Path, stack: ExitStack) -> None:
    make_keys(tmp_path / "keys", ["actor"])
    server = Server(str(tmp_path), str(tmp_path / "keys"))
    stack.callback(server.close)
    size = 31 * MIB  # of a frame, which is below the limit
    attack(server, b"CURVE", head(COMMAND, size), b"x" * MIB, 8, size - MIB)
    until(lambda: server.metrics().get("wire/refused_connections/greeting", 0) > 0)
    assert server.grown_mib() < 100


@pytest.mark.parametrize("part", [MIB, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_message_without_end_is_closed(plain: Server, stack: ExitStack, part: int) -> None:
    frames = (head(MORE, part) + b"x" * part) * (MIB // part)
    sent = attack(plain, b"NULL", b"", frames, 1, POURED)
    assert max(sent) < POURED
    until(lambda: closed(plain, "greeting") == 1)
    assert plain.grown_mib() < 400
    assert is_served(plain, stack)


@pytest.mark.slow
def test_a_message_without_end_of_a_known_actor_is_closed(plain: Server, stack: ExitStack) -> None:
    hello = msgspec.msgpack.encode({**STOP, "message": {"kind": "Request", "slots": 1}})
    opening = b"".join([head(MORE, len(hello)), hello, head(0, 16), sealed([hello])[-1]])
    sent = attack(plain, b"NULL", opening, head(MORE, MIB) + b"x" * MIB, 1, POURED)
    assert 32 * MIB < max(sent) < POURED
    until(lambda: closed(plain, "endless") == 1)
    assert plain.grown_mib() < 500
    assert is_served(plain, stack)


@pytest.mark.slow
def test_a_flood_of_small_messages_is_closed(plain: Server, stack: ExitStack) -> None:
    sent = attack(plain, b"NULL", b"", message(b"x") * 100_000, 1, POURED)
    assert max(sent) < POURED
    until(lambda: plain.metrics().get("wire/refused_connections/flood") == 1)
    assert plain.grown_mib() < 300
    assert is_served(plain, stack)


@pytest.mark.slow
def test_messages_that_are_not_read_take_as_much_as_one_that_has_no_end() -> None:
    program = """
from shared.wire.endpoints import EndpointSettings
from shared.wire.zeromq import Router
from tests.support.hostile.zmtp import connected, head, pour
router = Router("tcp://127.0.0.1:*", EndpointSettings(2**25))
message = head(0, 2**20) + bytes(2**20)
---
with connected(router.address, b"NULL") as connection:
    assert pour(connection, message, 2**30) < 2**30
assert router.refused["flood"] == 1, router.refused
read = 0
while router.wait(0.2):
    read += router.receive() is not None
assert 32 < read < 200, read
"""
    assert growth_of(program) < 200  # 32 + 16 of the messages, and what comes between two looks


def test_connections_that_say_nothing_are_few(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    monkeypatch.setattr("shared.wire.connections.MAX_UNHEARD", 4)
    router = Router("tcp://127.0.0.1:*")
    stack.callback(router.close)
    silent = [stack.enter_context(connected_raw(router.address)) for _ in range(12)]
    until(lambda: router.wait(0.05) or router.refused["crowd"] == 8)
    assert sum(is_open(connection) for connection in silent) == 4


def connected_raw(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20.0)


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not hung up after its greeting."""
    connection.settimeout(0.3)
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "header",
    [
        b"\x80" * (16 * MIB),
        msgspec.msgpack.encode({**STOP, "images": [""] * (16 * MIB)}),
        msgspec.msgpack.encode({**STOP, "message": {"kind": "Tickets", "tickets": [{"sample": [{}] * (16 * MIB)}]}}),
    ],
    ids=["maps", "images", "a free-form field"],
)
def test_a_header_that_unpacks_to_a_hundred_times_its_size_is_refused(
    plain: Server, stack: ExitStack, header: bytes
) -> None:
    peer = Peer(plain.address, "hostile")
    stack.callback(peer.close)
    peer.hello()
    peer.expect(Welcome)
    peer.socket.send_multipart(sealed([header]))
    until(lambda: plain.metrics().get("wire/rejected/too_many") == 1)
    assert is_served(plain, stack)
    assert plain.grown_mib() < 100  # 16 of the message, and the kept file's


# ------------------------------------------------------------------ in the learner and the engine

PICTURES = """
import io
import numpy as np
from PIL import Image as PILImage
from learner.batch.image_decoder import ImageDecoder
from shared.types import Image
from shared.families.registry import FAMILIES
from shared.vision import VisionSpec

SPEC = VisionSpec(7, FAMILIES["qwen3_vl"])

def picture(side, red):
    buffer = io.BytesIO()
    PILImage.new("RGB", (side, side), (red, 0, 0)).save(buffer, "PNG")
    return Image.of(buffer.getvalue())
"""


@pytest.mark.slow
def test_decoded_images_are_bounded() -> None:
    program = (
        PICTURES
        + """
decoder = ImageDecoder(SPEC, max_bytes=2**24)
decoder.get(picture(1024, 255))
---
for red in range(50):
    decoder.get(picture(1024, red))
"""
    )
    assert growth_of(program) < 60  # 150 without the bound


@pytest.mark.slow
def test_what_an_engine_is_sent_of_images_is_bounded() -> None:
    program = """
import os
from shared.engine.engine_messages import generate_body
from shared.types import Image, Sampling
---
for _ in range(300):
    generate_body([1], [Image.of(os.urandom(2**20))], Sampling())
"""
    assert growth_of(program) < 150  # 700 without the bound


@pytest.mark.slow
def test_error_texts_that_are_kept_are_short() -> None:
    program = """
import logging
from learner.tickets.member_health import MemberHealth
from shared.types import Group
from tests.support.wires import failed_episode
health = MemberHealth(0.5, logging.getLogger("test"))
---
for number in range(256):
    health.add("a", Group("0-a", "a", (failed_episode(error=f"{number} " + "x" * 2**21),)), lambda: {"a"})
"""
    assert growth_of(program) < 20  # 512 without the bound


@pytest.mark.slow
def test_an_episode_beyond_the_context_is_refused_before_it_takes_memory() -> None:
    program = (
        PICTURES
        + """
from learner.batch.episodes import check_group
from shared.types import Group, Turn
from tests.support.wires import episode

COUNT = 100
ids = np.array([1] + [7] * COUNT + [2], np.int32)
mask = np.array([0] * (COUNT + 1) + [1], np.uint8)
poison = episode(
    token_ids=ids, loss_mask=mask, behaviour_logprobs=np.zeros(COUNT + 2, np.float32),
    policy_versions=mask.astype(np.int32) - 1, turns=(Turn(COUNT + 1, COUNT + 2, 0.0),),
    images=(picture(4096, 0),) * COUNT,
)
---
try:
    check_group(Group("0-a", "a", (poison,)), ImageDecoder(SPEC), 2048)
    raise AssertionError("accepted")
except ValueError as error:
    assert "1638402 tokens" in str(error), error
"""
    )
    assert growth_of(program) < 20
