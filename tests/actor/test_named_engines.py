"""Actors without engines of their host play on those that the learner names, which come, go and move."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from actor.actor_loop import run_actor
from actor.named_engines import NamedEngines
from launch.engines.network import free_port
from learner.tickets.ticket_server import TicketServer
from shared.engine.engine_api import EngineClient, EngineError
from shared.engine_urls import MAX_ENGINES
from shared.types import Completion, Hello, Request, Sampling, Welcome
from shared.wire.codec import WireError, decode, encode
from tests.support.actor_rig import Learner, Stage, dismiss, with_learner
from tests.support.machine import LocalServer, QuietHandler, children_of, until, until_async
from tests.support.rollout_rig import completion
from tests.support.runs import command, metrics, places
from tests.support.tickets.server_rig import Peer, opened, ticket_server
from tests.support.wires import VOCAB, actor_settings, changed_header

__all__ = ["opened", "ticket_server"]  # fixtures

HOSTILE = ("http://[::1", "http://.", "http://host..domain:30000", "http://127.0.0.1:99999", "http://a" * 40 + "/")


class Told(EngineClient):
    """An engine that is ready when the test says so, and answers until it is dead."""

    made: dict[str, Told]

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_ready, self.is_dead, self.ended = asyncio.Event(), False, asyncio.Event()
        self.made[url] = self

    async def wait_ready(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self.is_ready.wait(), timeout_s)
        except TimeoutError:
            raise EngineError(self.url, "not healthy") from None
        self.suspect = False

    async def health(self, timeout_s: float = 10.0) -> None:
        if self.is_dead:
            raise EngineError(self.url, "cannot connect")

    async def generate(self, *_: Any, **settings: Any) -> Completion:
        if not self.is_dead:
            return completion(self.url)
        await self.ended.wait()  # a host that is lost answers nothing; closing the client ends the request
        self.suspect = True
        raise EngineError(self.url, "the connection broke")

    async def close(self) -> None:
        self.ended.set()


@pytest.fixture
def engines() -> dict[str, Told]:
    Told.made = {}
    return Told.made


def pool(patience_s: float = 5.0) -> NamedEngines:
    return NamedEngines(Told, "tcp://learner:1", patience_s=patience_s)


# ------------------------------------------------------------------ the actor's side


def test_an_engine_gets_episodes_once_it_is_ready_and_none_after_it_was_named_for_the_last_time(engines) -> None:
    async def main() -> None:
        named = pool()
        waiting = asyncio.create_task(named.choose())  # nobody is named yet
        assert named.follow([]) == named.follow(["http://a:1"]) == ""
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engines["http://a:1"].is_ready.set()
        assert (await waiting).url == "http://a:1"
        named.follow(["http://a:1", "http://b:1"])
        assert (await named.choose()).url == "http://a:1"  # b is not ready
        engines["http://b:1"].is_ready.set()
        await until_async(lambda: not engines["http://b:1"].suspect)
        named.follow(["http://b:1"])
        assert [(await named.choose()).url for _ in range(2)] == ["http://b:1"] * 2
        assert not engines["http://a:1"].ended.is_set()  # two episodes play there
        engines["http://a:1"].num_open = 0
        named.follow(["http://a:1", "http://b:1"])  # it is back
        assert len(named.clients) == 2
        await named.close()
        assert all(engine.ended.is_set() for engine in engines.values())

    asyncio.run(main())


def test_an_episode_goes_on_elsewhere_when_its_engine_is_named_no_more_and_answers_nothing(engines) -> None:
    async def main() -> None:
        named = pool()
        named.follow(["http://a:1"])
        engines["http://a:1"].is_ready.set()
        async with named.lease() as seat:
            engines["http://a:1"].is_dead = True
            turn = asyncio.create_task(seat.generate([1], [], Sampling()))
            await asyncio.sleep(0.01)
            named.follow(["http://b:2"])  # the host is lost, and its engine starts on another
            engines["http://b:2"].is_ready.set()
            assert await turn == completion("http://b:2")
            assert (seat.url, seat.retries) == ("http://b:2", 1)
        assert not engines["http://b:2"].num_open
        await named.close()

    asyncio.run(main())


def test_an_episode_without_any_engine_ends_with_whom_it_waited_for(engines) -> None:
    async def main() -> None:
        named = pool(patience_s=0.1)
        with pytest.raises(EngineError, match=r"tcp://learner:1: the learner has named no engine for 0\.1 s"):
            await named.choose()
        named.follow(["http://a:1"])
        with pytest.raises(EngineError, match="http://a:1: not healthy"):
            await named.choose()
        await named.close()

    asyncio.run(main())


def test_a_request_that_hangs_ends_when_its_client_is_closed() -> None:
    class Silent(QuietHandler):
        def do_POST(self) -> None:
            asked.set()
            over.wait(20)

    asked, over = threading.Event(), threading.Event()

    async def main(url: str) -> None:
        client = EngineClient(url)
        request = asyncio.create_task(client.generate([1], [], Sampling()))
        await until_async(asked.is_set)
        await client.close()
        with pytest.raises(EngineError, match="the connection broke"):
            await request
        with pytest.raises(EngineError):  # so does the next turn's
            await client.generate([1], [], Sampling())

    with closing(LocalServer(Silent)) as server:
        asyncio.run(main(server.url))
        over.set()


def test_addresses_that_are_none_cost_no_more_than_themselves() -> None:
    async def main() -> None:
        named = NamedEngines(EngineClient, "tcp://learner:1", patience_s=0.2)
        assert named.follow([*HOSTILE, "http://127.0.0.1:1"]) == ""
        with pytest.raises(EngineError, match="not healthy"):
            await named.choose()
        assert named.refusals.counts["engine_url"] >= 1
        await named.close()

    asyncio.run(main())


@with_learner
async def test_an_actor_asks_for_tickets_once_an_engine_is_named_and_gives_up_after_its_limit(learner: Learner) -> None:
    Told.made = {}
    named = pool(patience_s=1.5)
    settings = actor_settings(learner.address, engine_urls=())
    actor = asyncio.create_task(run_actor(settings, Stage().play, None, named))
    assert (await learner.expect(Hello)).engine_urls == ()
    assert (await learner.expect(Request)).slots == 0
    learner.engines = ("http://a:1",)
    assert await learner.expect(Request, lambda m: m.slots == 3)
    learner.engines = ()
    assert await learner.expect(Request, lambda m: m.slots == 0)
    while not actor.done():
        with_answer = asyncio.create_task(learner.expect(Hello))
        await asyncio.wait([actor, with_answer], return_when=asyncio.FIRST_COMPLETED)
        with_answer.cancel()
    assert await actor == 1
    await named.close()


@with_learner
async def test_an_actor_with_engines_of_its_own_takes_no_others(learner: Learner) -> None:
    learner.engines = ("http://a:1",)
    actor = asyncio.create_task(run_actor(actor_settings(learner.address), Stage().play))
    assert (await learner.expect(Request)).slots == 3
    await dismiss(learner, actor)


# ------------------------------------------------------------------ the learner's side, and the wire


def test_the_learner_names_the_engines_of_those_that_are_here_to_those_that_have_none(
    ticket_server: TicketServer, opened: list
) -> None:
    def named_to(peer: Peer, *own: str) -> tuple[str, ...]:
        peer.send(Hello(peer.name, own, VOCAB))
        return peer.expect(Welcome).engines

    alone, first, second = peers = [Peer(ticket_server.address, name) for name in ("alone", "a", "b")]
    opened += peers
    assert named_to(alone) == ()
    assert named_to(first, "http://a:1", "http://a:2") == named_to(second, "http://b:1") == ()
    assert named_to(alone) == ("http://a:1", "http://a:2", "http://b:1")
    many = tuple(f"http://b:{port}" for port in range(1, MAX_ENGINES + 1))
    named_to(second, *many)
    assert len(named_to(alone)) == MAX_ENGINES
    named_to(second, "http://b:7")  # it has moved
    assert named_to(alone) == ("http://a:1", "http://a:2", "http://b:7")


def test_an_actor_that_only_names_engines_does_not_count_as_idle(ticket_server: TicketServer, opened: list) -> None:
    engines, _ = peers = [Peer(ticket_server.address, name) for name in ("engines", "playing")]
    opened += peers
    engines.slots = 0
    for peer in peers:
        peer.hello()
        peer.expect(Welcome)
    engines.send(Hello("engines", ("http://engines",), VOCAB, (), 1.0))
    engines.expect(Welcome)
    assert ticket_server.metrics()["actors/idle_frac"] == 0.5  # the other one's


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        (["file:///etc/passwd"], "wrong_form"),
        (["http://a b"], "wrong_form"),
        (["http://a:1\n"], "wrong_form"),
        (["http://" + "a" * 2**11], "too_large"),
        (["http://a:1"] * (MAX_ENGINES + 1), "too_many"),
        ([7], "wrong_type"),
    ],
)
def test_a_welcome_with_what_is_no_engine_is_refused(urls: list, reason: str) -> None:
    sound = Welcome("run", 0, "p", ("http://a:1", "http://[::1]:2/way"))
    assert decode(encode(sound)) == sound
    with pytest.raises(WireError) as caught:
        decode(changed_header(sound, ["engines"], urls))
    assert caught.value.reason == reason


# ------------------------------------------------------------------ real processes


@contextmanager
def started(script: str, arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command(script, arguments), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_actors_on_another_host_train_the_colour_task_and_follow_an_engine_that_moves(tmp_path: Path) -> None:
    """Learner, engines alone and actors alone; the engine is killed with its host's commands and comes back at another
    port while episodes play."""
    arguments, logs = places(tmp_path, **{"learner.total_steps": 60}), tmp_path / "logs"
    logs.mkdir()
    with ExitStack() as everything:
        learner = everything.enter_context(started("learner", arguments, logs / "learner"))
        actors = everything.enter_context(started("actors", [*arguments, "--engine.count", "0"], logs / "actors"))
        until(lambda: "names no engine" in (logs / "actors").read_text(), 120, lambda: (logs / "actors").read_text())
        alone = [*arguments, "--actor.groups", "0"]
        first = everything.enter_context(started("actors", alone, logs / "first"))
        until(lambda: (tmp_path / "colour_tiny/metrics.jsonl").exists() and len(metrics(tmp_path)) > 5, 200)
        for pid in [first.pid, *children_of(first.pid)]:
            os.kill(pid, signal.SIGKILL)
        moved = [*alone, "--engine.port", str(free_port())]
        second = everything.enter_context(started("actors", moved, logs / "second"))
        codes = [each.wait(250) for each in (learner, actors, second)]
        assert codes == [0, 0, 0], [path.read_text()[-2000:] for path in logs.iterdir()]
    result = json.loads((tmp_path / "colour_tiny" / "result.json").read_text())
    assert result["success_after"] >= 0.9 and result["failed_after"] == 0
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    assert len(rows) == 60 and rows[-1]["tickets/dropped"] == 0
    named = [line for line in (logs / "actors").read_text().splitlines() if "named by the learner: " in line]
    assert len({line.rpartition(":")[2] for line in named}) == 2
