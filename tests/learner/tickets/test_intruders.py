"""Intruders on real sockets: none is served, each is logged once, and the ticket server goes on."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from actor.actor_loop import run_actor
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.config.sections import TransportConfig
from shared.keys import actor_keys, learner_keys, make_keys
from shared.log import get_logger
from shared.types import Hello, Ticket, Trajectory, Welcome
from shared.wire.auth import use_actor_keys, use_learner_keys
from shared.wire.endpoints import ActorKeys
from shared.wire.zeromq import Dealer
from tests.support.wires import RULES, VOCAB, actor_settings, book_settings, episode

PUBLIC = "tcp://0.0.0.0:*"


class Guarded:
    """A ticket server on an encrypted socket, and the lines that both log."""

    def __init__(self, tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.transport = TransportConfig(keys=str(tmp / "keys"))
        make_keys(tmp / "keys", ["actor"])
        keys = learner_keys(self.transport, PUBLIC)
        settings = TicketServerSettings("tcp://127.0.0.1:*", tmp / "run", "run-1", RULES, keys=keys)
        self.ticket_server = TicketServer(SeedSource(), book_settings(groups_per_version=1000), settings)
        self.ticket_server.open(0)
        self.address, self._caplog = self.ticket_server.address, caplog

    @property
    def key(self) -> ActorKeys:
        key = actor_keys(self.transport, PUBLIC)
        assert isinstance(key, ActorKeys)
        return key

    def logged(self, *words: str) -> int:
        """The number of lines with all of these words."""
        return sum(all(word in line for word in words) for line in self._caplog.messages)

    def trains(self) -> None:
        """A listed actor plays what is asked for."""

        async def play(ticket: Ticket, index: int) -> Trajectory:
            return episode(ticket.version)

        async def work() -> None:
            actor = asyncio.create_task(run_actor(actor_settings(self.address, keys=self.key), play))
            await asyncio.to_thread(self.ticket_server.next_batch, 2, 20.0)
            actor.cancel()
            await asyncio.gather(actor, return_exceptions=True)

        asyncio.run(work())


@pytest.fixture
def guarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Guarded]:
    with ExitStack() as stack:
        for name in ("auth", "tickets", "stranger"):
            logger = get_logger(name)
            logger.addHandler(caplog.handler)
            stack.callback(logger.removeHandler, caplog.handler)
        guarded = Guarded(tmp_path, caplog)
        stack.callback(guarded.ticket_server.stop, "the test is over")
        yield guarded


async def try_to_join(address: str, keys: ActorKeys | None, tries: int = 40) -> tuple[bool, str]:
    """Whether the learner took a message or answered, and what the client learns of its handshakes."""
    dealer = Dealer(address, "intruder", keys=keys)
    served = False
    for _ in range(tries):
        served |= await dealer.send(Hello("intruder", (), VOCAB))
        served |= await dealer.receive(0.05) is not None
    trouble = dealer.trouble()
    dealer.close()
    return served, trouble


def nobody(learner: bytes) -> None:
    """Has no keys."""


def stranger(learner: bytes) -> ActorKeys:
    """Its key is not on the list."""
    return ActorKeys(*zmq.curve_keypair(), learner)


def mistaken(learner: bytes) -> ActorKeys:
    """Expects another learner."""
    return stranger(zmq.curve_keypair()[0])


@pytest.mark.parametrize(
    ("client", "tries", "trouble", "logged"),
    [
        (nobody, 1, "transport.keys", "its handshake broke off: it has no keys"),
        pytest.param(stranger, 2, "allow-list", "is not allowed", marks=pytest.mark.slow),
        pytest.param(mistaken, 1, "transport.keys", "not encrypted for this learner's key", marks=pytest.mark.slow),
    ],
)
def test_an_intruder_is_not_served_and_logged_once(
    guarded: Guarded, client: Callable[[bytes], ActorKeys | None], tries: int, trouble: str, logged: str
) -> None:
    keys = client(guarded.key.learner)
    for _ in range(tries):
        served, said = asyncio.run(try_to_join(guarded.address, keys))
        assert not served and trouble in said
    guarded.trains()
    assert guarded.logged(logged) == 1


class Tap:
    """A TCP relay to the learner that keeps what the client said."""

    def __init__(self, address: str) -> None:
        self.target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self.said = self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self.target)
        threading.Thread(target=self._relay, args=(server, client, "heard"), daemon=True).start()
        self._relay(client, server, "said")

    def _relay(self, source: socket.socket, sink: socket.socket, kept: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                setattr(self, kept, getattr(self, kept) + data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def replay(self) -> bytes:
        """Says it all again on a new connection; returns the learner's answer until it hangs up."""
        answer = b""
        with socket.create_connection(self.target, timeout=10.0) as again:
            again.sendall(self.said)
            while data := again.recv(65536):
                answer += data
        return answer


def test_a_replayed_conversation_is_refused(guarded: Guarded) -> None:
    async def honest(address: str) -> None:
        dealer = Dealer(address, "honest", keys=guarded.key)
        while not await dealer.send(Hello("honest", (), VOCAB)):
            await asyncio.sleep(0.05)
        assert await dealer.receive(10.0) is not None
        dealer.close()

    tap = Tap(guarded.address)
    asyncio.run(honest(tap.address))
    assert b"READY" in tap.heard
    answers = [tap.replay() for _ in range(3)]
    assert all(b"READY" not in answer for answer in answers)  # the handshake never completes
    guarded.trains()
    assert guarded.logged("actor honest", "is here") == 1
    assert guarded.logged("refused a client", "old one") == 1


def test_a_listed_client_that_sends_nonsense_is_counted_and_logged_once(guarded: Guarded) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as client:
        client.linger = 0
        use_actor_keys(client, guarded.key)
        client.setsockopt(zmq.ROUTING_ID, b"fool#1")
        client.connect(guarded.address)
        for number in range(50):
            client.send_multipart([b"nonsense", bytes([number])])
        guarded.trains()
        rejected = guarded.ticket_server.metrics()["wire/rejected"]
        assert client.poll(0) == 0
    context.term()
    assert rejected == 50
    assert guarded.logged("rejected a message of fool#1") == 1


def test_an_actor_that_was_refused_says_why_it_leaves(guarded: Guarded) -> None:
    async def play(ticket: Ticket, index: int) -> Trajectory:
        raise AssertionError

    keys = stranger(guarded.key.learner)
    settings = actor_settings(guarded.address, "stranger", keys=keys, connect_timeout_s=1.0)
    assert asyncio.run(run_actor(settings, play)) == 1
    assert guarded.logged("it refuses this actor's key")


def test_without_its_zap_handler_an_encrypted_socket_accepts_nobody(tmp_path: Path) -> None:
    """Each handshake asks the handler: one that nobody answers fails."""
    make_keys(tmp_path / "keys", ["actor"])
    transport = TransportConfig(keys=str(tmp_path / "keys"))
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        keys = learner_keys(transport, PUBLIC)
        assert keys is not None
        handler = use_learner_keys(router, keys)
        assert handler is not None
        router.bind("tcp://127.0.0.1:*")
        address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        handler.close()
        served, _ = asyncio.run(try_to_join(address, actor_keys(transport, PUBLIC), tries=10))
        assert not served and not router.poll(0)
    context.term()


def rewrite_list(guarded: Guarded, change: Callable[[str], str]) -> None:
    path = Path(guarded.transport.keys) / "allowed"
    new = path.with_name("new")
    new.write_text(change(path.read_text()))
    new.replace(path)  # at once: half a list could be read otherwise


async def answered(dealer: Dealer, tries: int) -> bool:
    """Whether the learner answers one of so many heartbeats."""
    for _ in range(tries):
        await dealer.send(Hello("a", (), VOCAB))
        if isinstance(await dealer.receive(0.1), Welcome):
            return True
    return False


def test_a_key_taken_off_the_list_is_not_heard_any_more_though_it_is_connected(guarded: Guarded) -> None:
    async def talk() -> None:
        dealer = Dealer(guarded.address, "a", keys=guarded.key)
        assert await answered(dealer, 100)
        make_keys(Path(guarded.transport.keys), ["other"])
        rewrite_list(guarded, lambda text: "".join(line for line in text.splitlines(True) if line.endswith("other\n")))
        for _ in range(200):
            await dealer.send(Hello("a", (), VOCAB))
            await asyncio.sleep(0.05)
            if await dealer.receive(0.1) is None and guarded.logged("no longer allowed"):
                break
        assert not await answered(dealer, 5)
        again, _ = await try_to_join(guarded.address, guarded.key, tries=5)
        other = actor_keys(guarded.transport.model_copy(update={"key_name": "other"}), PUBLIC)
        added, _ = await try_to_join(guarded.address, other, tries=100)
        assert added and not again  # without a restart of the learner
        dealer.close()

    asyncio.run(talk())
    assert guarded.logged("no longer allowed") == 1
    assert guarded.logged("added other; removed actor") == 1


def test_a_list_that_cannot_be_read_changes_nothing_and_is_reported(guarded: Guarded) -> None:
    rewrite_list(guarded, lambda text: text + "not a key\n")

    async def talk() -> None:
        dealer = Dealer(guarded.address, "a", keys=guarded.key)
        for _ in range(100):
            assert await answered(dealer, 100)
            if guarded.logged("stays as it was", "line 2"):
                break
            await asyncio.sleep(0.1)  # the list is looked at once a second
        assert await answered(dealer, 100)
        dealer.close()

    asyncio.run(talk())
    assert guarded.logged("stays as it was") == 1
