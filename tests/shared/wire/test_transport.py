"""Real sockets: messages arrive, limits hold, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared.config.sections import TransportConfig
from shared.keys import actor_keys, learner_keys, make_keys
from shared.types import Bye, Group, Hello, Sample, Sampling, Stop, Ticket, Tickets, Welcome
from shared.wire import auth, zeromq
from shared.wire.auth import use_actor_keys
from shared.wire.codec import WireError, decode, encode
from shared.wire.endpoints import DEFAULT_SETTINGS, Delivery, EndpointSettings
from shared.wire.zeromq import RECEIVED_COPY_BYTES, Dealer, Router
from tests.support.hostile.zmtp import greeting, ready
from tests.support.wires import episode

ANY = "tcp://127.0.0.1:*"


def between(
    talk: Callable[[Router, Dealer], Coroutine[Any, Any, None]], settings: EndpointSettings = DEFAULT_SETTINGS
) -> None:
    """Runs `talk` with a learner's and an actor's socket."""

    async def run() -> None:
        router = Router(ANY, settings)
        dealer = Dealer(router.address, "a", settings)
        await talk(router, dealer)
        dealer.close()
        router.close()

    asyncio.run(run())


def wait_for(router: Router) -> tuple[bytes, list[bytes]]:
    assert router.wait(5.0)
    received = router.receive()
    assert received is not None
    return received


async def send(dealer: Dealer, message: object) -> None:
    for _ in range(100):
        if await dealer.send(message):  # type: ignore[arg-type]
            return
        await asyncio.sleep(0.02)
    raise AssertionError("never connected")


def test_messages_go_both_ways() -> None:
    async def talk(router: Router, dealer: Dealer) -> None:
        await send(dealer, Hello("a", (), 5))
        peer, frames = wait_for(router)
        assert peer.startswith(b"a#")
        assert decode(frames) == Hello("a", (), 5)
        assert router.send(peer, Welcome("r", 1, "p")) is Delivery.SENT
        assert await dealer.receive(5.0) == Welcome("r", 1, "p")
        assert await dealer.receive(0.01) is None

    between(talk)


@pytest.mark.parametrize("num_bytes", [100, RECEIVED_COPY_BYTES, 3 * RECEIVED_COPY_BYTES])
def test_an_image_comes_back_equal_whether_it_is_copied_or_shared(num_bytes: int) -> None:
    async def talk(router: Router, dealer: Dealer) -> None:
        sent = Group("t", "a", (episode(image=os.urandom(num_bytes)),))
        await send(dealer, sent)
        peer, frames = wait_for(router)
        group = decode(frames)
        assert isinstance(group, Group)
        image = group.trajectories[0].images[0]
        assert image == sent.trajectories[0].images[0]
        assert isinstance(image.data, bytes) == (num_bytes < RECEIVED_COPY_BYTES)
        assert hash(image) == hash(sent.trajectories[0].images[0])
        ticket = Ticket("t", Sample("s", images=(image,)), 1, 0, Sampling(), 1.0)  # and on its way again
        assert router.send(peer, Tickets((ticket,))) is Delivery.SENT
        assert await dealer.receive(5.0) == Tickets((ticket,))

    between(talk)


def test_a_message_that_comes_while_another_is_sent_is_not_missed() -> None:
    async def talk(router: Router, dealer: Dealer) -> None:
        await send(dealer, Hello("a", (), 5))
        peer, _ = wait_for(router)
        waiting = asyncio.create_task(dealer.receive(60.0))
        for _ in range(50):
            await asyncio.sleep(0)
            assert await dealer.send(Bye("still here"))
            if router.wait(0.0):
                router.receive()
        assert router.send(peer, Stop("over")) is Delivery.SENT
        await asyncio.to_thread(router.wait, 0.2)
        assert await dealer.send(Bye("now"))  # consumes ZeroMQ's signal
        assert await asyncio.wait_for(waiting, 10.0) == Stop("over")

    between(talk)


def test_two_actors_of_one_name_are_two_peers() -> None:
    async def talk(router: Router, dealer: Dealer) -> None:
        other = Dealer(router.address, "a")
        for one in (dealer, other):
            await send(one, Hello("a", (), 5))
        assert wait_for(router)[0] != wait_for(router)[0]
        other.close()

    between(talk)


def test_nothing_is_queued_for_a_peer_that_is_not_there() -> None:
    async def talk(router: Router, dealer: Dealer) -> None:
        assert router.send(b"nobody", Stop("x")) is Delivery.GONE
        alone = Dealer("tcp://127.0.0.1:9", "a")
        assert not await alone.send(Hello("a", (), 5))
        alone.close()

    between(talk)


class Deaf:
    """A learner's socket by hand that ends the handshake, and then reads nothing more."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._connection = self._listener.accept()[0]
        self._connection.sendall(greeting(b"NULL") + ready(b"ROUTER"))

    def close(self) -> None:
        self._thread.join(5.0)
        for each in (self._connection, self._listener):
            each.close()


def test_a_full_queue_refuses_the_next_message() -> None:
    deaf = Deaf()

    async def talk() -> None:
        dealer = Dealer(deaf.address, "a", EndpointSettings(queue_messages=2))
        await send(dealer, Hello("a", (), 5))
        group = Group("t", "a", (episode(image=os.urandom(2**20)),))
        sent = 0
        while sent < 200 and await dealer.send(group):
            sent += 1
        assert 0 < sent < 200  # the queue, and what the kernel holds
        dealer.close()

    asyncio.run(talk())
    deaf.close()


FULL = """
import sys, time, zmq
from shared.wire.endpoints import EndpointSettings
from shared.wire.zeromq import Router
router = Router("tcp://127.0.0.1:*", EndpointSettings(queue_messages=4, keepalive_s=0.2))
context = zmq.Context()
client = context.socket(zmq.DEALER)
client.linger = 0
client.connect(router.address)
for _ in range(500):
    client.send_multipart([bytes(10_000), b"x"])
time.sleep(0.3)
context.destroy(0)
time.sleep(1.0)  # heartbeats would have been due meanwhile
read = 0
while router.wait(0.2):
    read += router.receive() is not None
print(read)
"""


@pytest.mark.slow
def test_an_actor_that_goes_while_its_queue_is_full_does_not_end_the_learner() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 4


class Nowhere:
    """Accepts connections, and passes nothing on."""

    def __init__(self) -> None:
        self.accepted: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                self.accepted.append(self._listener.accept()[0])

    def close(self) -> None:
        for each in (self._listener, *self.accepted):
            each.close()


def test_a_connection_that_leads_nowhere_is_made_anew() -> None:
    nowhere = Nowhere()

    async def wait() -> None:
        dealer = Dealer(nowhere.address, "a", EndpointSettings(keepalive_s=0.1))
        for _ in range(200):
            assert await dealer.receive(0.05) is None
            if len(nowhere.accepted) > 2:
                break
        dealer.close()

    asyncio.run(wait())
    assert len(nowhere.accepted) > 2
    nowhere.close()


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_what_was_read_of_a_connection_does_not_count(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: it is a hundred times the bound, in frames around each size at which their heads change."""
    for name in ("LITTLE_BYTES", "SLACK_BYTES"):
        monkeypatch.setattr(f"shared.wire.connections.{name}", 2**13)
    transport = TransportConfig(keys=str(tmp_path / "keys") if encrypted else "")
    if encrypted:
        make_keys(tmp_path / "keys", ["actor"])
    router = Router(ANY, EndpointSettings(max_message_bytes=2**13), learner_keys(transport, ANY))
    context = zmq.Context()
    with context.socket(zmq.DEALER) as client:
        client.linger = 0
        if encrypted:
            use_actor_keys(client, actor_keys(transport, ANY))
        client.connect(router.address)
        for count in range(6_000):
            client.send_multipart([bytes(size + count % 2) for size in (0, 30, 221, 254, 0)])
            while not router.receive():
                router.wait(0.01)
            if count % 1000 == 0:
                time.sleep(0.02)  # a look falls in between
    context.term()
    assert not router.refused
    router.close()


def test_the_sender_refuses_a_message_above_the_limit() -> None:
    async def talk(router: Router, dealer: Dealer) -> None:
        with pytest.raises(WireError, match="too_large"):
            await dealer.send(Group("t", "a", (episode(image=b"x" * 2000),)))

    between(talk, EndpointSettings(max_message_bytes=1000))


def test_an_occupied_port_is_one_line_with_address_and_cure() -> None:
    router = Router(ANY)
    with pytest.raises(ValueError, match=r"learner\.bind = 'tcp://127.*in use.*choose another") as caught:
        Router(router.address)
    assert "\n" not in str(caught.value)
    router.close()


@pytest.mark.parametrize("address", ["nonsense", "udp://127.0.0.1:1", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:5555x"])
def test_an_address_that_is_none_is_one_line(address: str) -> None:
    with pytest.raises(ValueError, match=r"learner\.bind"):
        Router(address)
    with pytest.raises(ValueError, match=r"actor\.learner"):
        Dealer(address, "a")


def test_each_socket_is_encrypted_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bytes]] = []
    make_keys(tmp_path / "keys", ["actor"])
    transport = TransportConfig(keys=str(tmp_path / "keys"))

    def watch(use: Callable) -> None:
        def watched(socket: zmq.Socket, keys: object) -> object:
            seen.append((socket.type, socket.getsockopt(zmq.LAST_ENDPOINT)))
            return use(socket, keys)

        monkeypatch.setattr(zeromq, use.__name__, watched)

    watch(auth.use_learner_keys)
    watch(auth.use_actor_keys)

    async def talk() -> None:
        router = Router(ANY, keys=learner_keys(transport, ANY))
        Dealer(router.address, "a", keys=actor_keys(transport, ANY)).close()
        router.close()

    asyncio.run(talk())
    assert [kind for kind, _ in seen] == [zmq.ROUTER, zmq.DEALER]
    assert all(endpoint.strip(b"\0") == b"" for _, endpoint in seen)


def test_a_peer_that_comes_again_while_its_old_connection_is_open_is_answered_on_the_new_one() -> None:
    """The learner's host may learn late, or never, that a connection is gone."""
    router, context = Router(ANY), zmq.Context()
    old, new = (context.socket(zmq.DEALER) for _ in range(2))
    for number, client in enumerate((old, new)):
        client.linger, client.routing_id = 0, b"a#1"
        client.connect(router.address)
        client.send_multipart([bytes(frame) for frame in encode(Hello(f"{number}", (), 5))])
        peer, frames = wait_for(router)
        assert (peer, decode(frames)) == (b"a#1", Hello(f"{number}", (), 5))
    assert router.send(b"a#1", Stop("over")) is Delivery.SENT
    assert new.poll(5000)
    assert decode(new.recv_multipart()) == Stop("over")
    old.close()
    new.close()
    context.term()
    router.close()
