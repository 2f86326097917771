"""What no honest ZeroMQ socket says, to a learner's socket that does not read meanwhile: no process ends of it."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from shared.config.sections import TransportConfig
from shared.keys import actor_keys, make_keys
from shared.wire.auth import use_actor_keys
from tests.support.hostile.zmtp import COMMAND, MORE, Line, break_off, command, connected, message

PUBLIC = "tcp://0.0.0.0:*"
READER = """
import select, sys, time
from shared.keys import learner_keys
from shared.config.sections import TransportConfig
from shared.wire.endpoints import EndpointSettings
from shared.wire.zeromq import Router
keys = learner_keys(TransportConfig(keys=sys.argv[1]), "tcp://0.0.0.0:*") if len(sys.argv) > 1 else None
router = Router("tcp://127.0.0.1:*", EndpointSettings(queue_messages=4), keys)
print(router.address, flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    router.wait(0.01)  # for handshakes; nothing is read
read = 0
while router.wait(0.5):
    read += router.receive() is not None
print(read)
"""
COMMANDS = {
    "a ping": command(b"PING", b"\0\0"),
    "a ping that ends the connection after 0.1 s": command(b"PING", b"\0\1"),
    "a ping without a time": command(b"PING"),
    "a ping with much to be repeated": command(b"PING", b"\0\0" + b"x" * 10_000),
    "a pong": command(b"PONG", b"x" * 16),
    "a subscription": command(b"SUBSCRIBE", b"x"),
    "the end of one": command(b"CANCEL", b"x"),
    "an error": command(b"ERROR", b"\4fool"),
    "another ready": command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"),
    "an unknown command": command(b"x" * 255, b"y" * 1000),
    "an empty command": bytes([COMMAND, 0]),
    "a command shorter than its name": bytes([COMMAND, 2, 200, 0]),
    "a part of a command": bytes([COMMAND | MORE, 5]) + b"\4PING",
    "a frame of all flags": b"\xff" + struct.pack(">Q", 3) + b"abc",
}


class Reader:
    """A process with a Router that reads only when it is told to."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", READER, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def ends_well(self) -> int:
        """How many messages it has read."""
        said, errors = self.process.communicate("\n", timeout=60.0)
        assert (self.process.returncode, errors) == (0, "")
        return int(said)


@pytest.mark.slow
def test_no_command_among_messages_that_are_not_read_ends_the_learner() -> None:
    reader = Reader()
    connections = [connected(reader.address, b"NULL") for _ in COMMANDS]
    for connection, said in zip(connections, COMMANDS.values(), strict=True):
        connection.sendall(message(b"a") * 50 + said + message(b"b") * 50)
    time.sleep(0.3)
    for connection in connections:
        break_off(connection)
    time.sleep(0.3)
    assert reader.ends_well() > 50 * len(COMMANDS)


@pytest.mark.slow
def test_a_connection_whose_name_another_one_takes_ends_nothing() -> None:
    reader = Reader()
    for _ in range(5):
        pair = [connected(reader.address, b"NULL", b"one name") for _ in range(2)]
        for connection in pair:
            with suppress(OSError):
                connection.sendall(message(b"a") * 50 + COMMANDS["a ping"] + message(b"b") * 50)
        time.sleep(0.1)
        for connection in pair:
            break_off(connection)
    reader.ends_well()


@pytest.mark.slow
def test_a_name_that_libzmq_would_give_itself_ends_nothing() -> None:
    """It gives a number to a peer without a name, counting from one that every process without a seed begins with."""
    reader = Reader()
    names = [b"\0" + struct.pack(">I", 0x6B8B4567 + number) for number in range(40)]
    named = [connected(reader.address, b"NULL", name) for name in names]
    nameless = [connected(reader.address, b"NULL") for _ in range(10)]
    for connection in (*named, *nameless):
        connection.sendall(message(b"a"))
    assert reader.ends_well() == len(named) + len(nameless)


@pytest.fixture
def client() -> Iterator[zmq.Socket]:
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    yield client
    client.close(0)
    context.term()


@pytest.mark.slow
def test_pings_under_encryption_in_an_unread_queue_do_not_end_the_learner(tmp_path: Path, client: zmq.Socket) -> None:
    make_keys(tmp_path / "keys", ["actor"])
    keys = actor_keys(TransportConfig(keys=str(tmp_path / "keys")), PUBLIC)
    assert keys is not None
    reader = Reader(str(tmp_path / "keys"))
    line = Line(reader.address)
    use_actor_keys(client, keys)
    client.heartbeat_ivl, client.heartbeat_timeout = 1, 60_000
    client.connect(line.address)
    for _ in range(300):
        client.send(b"a")
        time.sleep(0.001)
    line.break_off()
    time.sleep(0.3)
    assert reader.ends_well() > 50
