"""An episode outlives its engine: the turn is asked of another one, and nothing of what was played is lost."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from actor.custom_rollout import RolloutContext
from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits, Stream, cache_key
from actor.rollout import Player
from launch.engines.network import free_port
from shared.engine.engine_api import EngineClient, EngineError
from shared.log import get_logger
from shared.types import Completion, Ending, Sampling, Trajectory, Turn
from tests.support.hostile.engine_server import CONTENT, HostileEngine
from tests.support.rollout_rig import Counting, Scripted, completion, renderer, threads, ticket
from tests.support.tiny import running_engine

__all__ = ["renderer", "threads"]  # fixtures

BROKEN = EngineError("http://scripted:1", "the connection broke")
ABORTED = completion("half", reason="abort")


def engine_of(name: str, *answers: object) -> Scripted:
    engine = Scripted(answers)
    engine.url = f"http://{name}:1"
    return engine


def played(renderer, threads, *engines: EngineClient, **changes: object) -> Trajectory:
    pool = EnginePool(engines, patience_s=0.3, turn_tries=3)
    player = Player(Counting, renderer, pool, EpisodeLimits(), threads)
    trajectory = asyncio.run(player.play(ticket(seed=3, **changes)))
    assert [engine.num_open for engine in engines] == [0] * len(engines)
    return trajectory


@pytest.mark.parametrize("failure", [BROKEN, ABORTED, Completion((), (), (), "abort")], ids=["broken", "half", "none"])
def test_a_turn_whose_engine_fails_is_asked_of_another_one_from_the_same_tokens(renderer, threads, failure) -> None:
    texts = [completion("up", 1), completion("on", 4), completion("end", 5)]
    whole = played(renderer, threads, engine_of("a", *texts))
    first, second = engine_of("a", texts[0], failure), engine_of("b", *texts[1:])
    trajectory = played(renderer, threads, first, second)
    assert trajectory.ending is Ending.COMPLETED
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions"):
        np.testing.assert_array_equal(getattr(trajectory, name), getattr(whole, name))
    assert (trajectory.turns, trajectory.images, trajectory.reward) == (whole.turns, whole.images, whole.reward)
    assert second.requests[0] == first.requests[1]  # tokens, images, limits, seed, cache key
    assert len(second.requests) == 2  # it stays where it went
    assert (trajectory.metrics["engine_retries"], whole.metrics["engine_retries"]) == (1.0, 0.0)


def test_the_tries_of_one_turn_are_bounded_and_counted_anew_at_the_next(renderer, threads) -> None:
    answers = [BROKEN, BROKEN, "up", BROKEN, BROKEN, "end", "never"]
    trajectory = played(renderer, threads, engine_of("a", *answers))
    assert (trajectory.ending, trajectory.metrics["engine_retries"]) == (Ending.COMPLETED, 4.0)
    trajectory = played(renderer, threads, engine_of("a", "up", BROKEN, BROKEN, BROKEN, "end"))
    assert (trajectory.ending, trajectory.metrics["engine_retries"]) == (Ending.ENGINE_ERROR, 2.0)
    assert len(trajectory.turns) == 1


def test_a_request_that_every_engine_would_refuse_is_made_once(renderer, threads) -> None:
    refusal = EngineError("http://a:1", "/generate: HTTP 400: too long", 400)
    first, second = engine_of("a", "up", refusal), engine_of("b", "end")
    trajectory = played(renderer, threads, first, second)
    assert trajectory.ending is Ending.ENGINE_ERROR
    assert "too long" in trajectory.error
    assert not second.requests


def test_a_rollout_function_outlives_its_engine_too(renderer, threads) -> None:
    async def rollout(context: RolloutContext) -> Trajectory:
        stream = Stream()
        stream.observe(context.renderer.start([{"role": "user", "content": "Begin."}]))
        start = len(stream.token_ids)
        stream.sample(await context.engine.generate(stream.token_ids, stream.images, context.sampling, seed=1))
        return stream.trajectory([Turn(start, len(stream.token_ids), 1.0)], Ending.COMPLETED)

    pool = EnginePool([engine_of("a", BROKEN), well := engine_of("b", "end")])
    trajectory = asyncio.run(Player(Counting, renderer, pool, EpisodeLimits(), threads, rollout=rollout).play(ticket()))
    assert (trajectory.ending, trajectory.metrics["engine_retries"]) == (Ending.COMPLETED, 1.0)
    assert well.requests[0][2]["cache_key"] == cache_key(ticket())  # nor does it share what older weights computed


def test_a_turn_waits_for_an_engine_to_come_back_when_none_is_well(folder) -> None:
    async def main() -> None:
        dead = EngineClient(f"http://127.0.0.1:{free_port()}")
        with running_engine(folder) as (url, _):
            late = EngineClient(url)
            late.suspect = True  # until it answers
            pool = EnginePool([dead, late], patience_s=5.0)
            dead.num_open, late.num_open = 0, 1
            async with pool.lease() as seat:
                assert (await seat.generate([30], [], Sampling(max_new_tokens=2))).token_ids
                assert (seat.url, seat.retries) == (url, 1)
            await pool.close()

    asyncio.run(main())


def test_engines_that_stay_away_cost_their_patience_once(renderer, threads) -> None:
    dead = [EngineClient(f"http://127.0.0.1:{free_port()}") for _ in range(2)]

    async def main() -> Trajectory:
        pool = EnginePool(dead, patience_s=0.3)
        player = Player(Counting, renderer, pool, EpisodeLimits(), threads)
        try:
            return await player.play(ticket())
        finally:
            await pool.close()

    trajectory = asyncio.run(main())
    assert trajectory.ending is Ending.ENGINE_ERROR
    assert "not healthy" in trajectory.error


def test_an_episode_that_is_cancelled_while_news_of_an_engine_comes_ends_and_keeps_no_place() -> None:
    async def main() -> None:
        client = EngineClient("http://127.0.0.1:9")
        client.suspect = True
        pool = EnginePool([client], patience_s=30.0)
        waiting = asyncio.create_task(pool.choose())
        await asyncio.sleep(0.05)
        client.suspect = False
        pool.wake_waiting()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert client.num_open == 0
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


FAULTS = [name for name in CONTENT if name != "another canary"] + ["negative chunk", "endless extension"]


async def ask_often(pool: EnginePool, seconds: float, at_once: int = 4) -> tuple[int, int]:
    """Return how many turns were generated, and how many failed."""
    deadline, good, bad = time.monotonic() + seconds, 0, 0

    async def one() -> None:
        nonlocal good, bad
        while time.monotonic() < deadline:
            try:
                async with pool.lease() as lease:
                    await lease.generate([30], [], Sampling(max_new_tokens=8))
                good += 1
            except EngineError:
                bad += 1
            await asyncio.sleep(0.01)

    pool.newest.update(1, "")
    await asyncio.gather(*(one() for _ in range(at_once)))
    await pool.close()
    return good, bad


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mad_engine_beside_a_sound_one_costs_no_turn_and_is_named_once(caplog, monkeypatch, fault: str) -> None:
    monkeypatch.setattr(get_logger("actor"), "propagate", True)
    with HostileEngine() as mad, HostileEngine() as sound:
        mad.spoil("/generate", fault)
        pool = EnginePool([EngineClient(url, vocab_size=640) for url in (mad.url, sound.url)])
        good, bad = asyncio.run(ask_often(pool, 2.0))
    assert bad == 0 and good > 20
    (line,) = {record.getMessage() for record in caplog.records if "a turn is asked for again" in record.getMessage()}
    assert mad.url in line
    assert mad.counts["/generate"] < 50  # first the episodes that were there, then it is polled


def test_an_engine_that_fails_again_and_again_is_left_alone_for_growing_times() -> None:
    """It answers the one token of the trial, and no turn."""

    class Flaky(EngineClient):
        tried: ClassVar[list[float]] = []

        async def generate(self, *_: object, **__: object) -> Completion:
            self.tried.append(time.monotonic())
            self.mark_suspect()
            raise EngineError(self.url, "no turn here")

    with HostileEngine() as engine:
        flaky = Flaky(engine.url)
        good, bad = asyncio.run(ask_often(EnginePool([flaky], patience_s=5.0), 3.5, at_once=2))
    rounds = [b - a for a, b in pairwise(flaky.tried) if b - a > 0.5]
    assert good == 0 and 2 <= bad <= 12
    assert len(rounds) >= 2 and rounds[-1] > 1.5 * rounds[0]


def test_many_dead_engines_do_not_keep_an_actor_from_the_sound_one() -> None:
    with socket.socket() as taken, HostileEngine() as sound:
        taken.bind(("127.0.0.1", 0))  # refuses: it does not listen
        port = taken.getsockname()[1]
        dead = [EngineClient(f"http://127.0.0.1:{port}/{number}") for number in range(200)]
        clients = [*dead, EngineClient(sound.url)]
        for client in clients:
            client.suspect = True

        async def main() -> tuple[float, int]:
            pool, began = EnginePool(clients), time.monotonic()
            async with pool.lease() as lease:
                assert lease.url == sound.url
                took, descriptors = time.monotonic() - began, len(os.listdir("/proc/self/fd"))
            await pool.close()
            return took, descriptors

        took, descriptors = asyncio.run(main())
    assert took < 60 and descriptors < 300
