"""What a user's environment, reward or rollout may do costs its own episode alone: exit, cancel, hang, be given up."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from actor import render
from actor.engine_pool import EnginePool
from actor.env_threads import EnvCalls, EnvThreads, EnvTimeout, Left, TooManyHang
from actor.limits import EpisodeLimits
from actor.rewards import FunctionReward
from actor.rollout import Player
from shared.types import Ending
from tests.support.rollout_rig import Counting, Scripted, play, renderer, threads, ticket

__all__ = ["renderer", "threads"]  # fixtures


class Gated(EnvThreads):
    """One thread, and an event that its calls may wait for."""

    def __init__(self, **settings: int) -> None:
        super().__init__(1, **settings)
        self.begun, self.release = threading.Event(), threading.Event()

    def hang(self) -> None:
        self.begun.set()
        self.release.wait()


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def exits(_: object) -> float:
    sys.exit(2)


async def exits_later(_: object) -> float:
    sys.exit(2)


async def cancels(_: object) -> float:
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    return await inner or 0.0


def cancels_in_a_loop(_: object) -> float:
    return asyncio.run(cancels(None))


@pytest.mark.parametrize(("step", "words"), [(exits, "SystemExit 2"), (cancels_in_a_loop, "CancelledError")])
def test_an_environment_that_exits_or_cancels_itself_is_its_episodes_ending(renderer, threads, step, words):
    class Leaving(Counting):
        def step(self, text):
            return step(text)

    trajectory, _ = play(renderer, threads, ["up"], env=Leaving)
    assert trajectory.ending is Ending.ENV_ERROR and words in trajectory.error


@pytest.mark.parametrize("function", [exits, exits_later, cancels, cancels_in_a_loop])
def test_so_is_a_reward(renderer, threads, function):
    async def main() -> None:
        reward = FunctionReward(function, threads, 30.0)
        player = Player(Counting, renderer, EnginePool([Scripted(["end"])]), EpisodeLimits(), threads, reward)
        trajectory = await player.play(ticket())
        assert trajectory.ending is Ending.REWARD_ERROR and trajectory.error.startswith("Left: ")

    run(main())


@pytest.mark.parametrize("function", [exits_later, cancels])
def test_so_is_a_rollout(renderer, threads, function):
    async def main() -> None:
        engines, limits = EnginePool([Scripted([])]), EpisodeLimits()
        player = Player(Counting, renderer, engines, limits, threads, rollout=function)
        trajectory = await player.play(ticket())
        assert trajectory.ending is Ending.ENV_ERROR and "rollout: Left: " in trajectory.error

    run(main())


def test_a_rollout_is_still_cancelled_with_its_ticket(renderer, threads):
    async def main() -> None:
        begun = asyncio.Event()

        async def waits(_: object) -> Any:
            begun.set()
            await asyncio.sleep(60)

        player = Player(Counting, renderer, EnginePool([Scripted([])]), EpisodeLimits(), threads, rollout=waits)
        playing = asyncio.create_task(player.play(ticket()))
        await begun.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run(main())


def test_a_call_whose_waiter_is_cancelled_keeps_its_limit():
    async def main() -> None:
        pool = Gated()
        waiting = asyncio.create_task(pool.run(pool.hang, 0.2))
        await until(pool.begun.is_set)
        behind = asyncio.create_task(pool.run(lambda: pytest.fail("begun"), 0.2))  # in the queue
        await asyncio.sleep(0)
        for task in (waiting, behind):
            task.cancel()
        assert await pool.run(lambda: 7, 5.0) == 7  # by a thread in place of the one that hangs
        assert pool.num_lost == 1
        pool.release.set()
        await until(lambda: not pool.num_lost)
        pool.close()

    run(main())


def test_so_many_of_them_end_the_process_too():
    async def main() -> None:
        pool = Gated(max_lost=0)
        waiting = asyncio.create_task(pool.run(pool.hang, 0.05))
        await until(pool.begun.is_set)
        waiting.cancel()
        await until(lambda: pool.num_lost == 1)
        with pytest.raises(TooManyHang, match="1 calls"):
            await pool.run(lambda: 7, 5.0)
        pool.release.set()
        pool.close()

    run(main())


def test_what_would_end_a_thread_is_an_exception_for_the_waiter():
    async def main() -> None:
        pool = EnvThreads(1)
        with pytest.raises(Left, match="SystemExit 2"):
            await pool.run(lambda: exits(None), 5.0)
        assert await pool.run(lambda: 7, 5.0) == 7
        pool.close()

    run(main())


# ---------------------------------------------------------------------- episodes that are given up


@pytest.mark.parametrize("where", ["step", "generate", "reward"])
def test_the_environment_of_a_cancelled_episode_is_closed_after_the_call_that_runs(renderer, where):
    async def main() -> None:
        pool, envs, found_closed = Gated(), [], []

        def hang_in(env):
            pool.hang()
            found_closed.append(env.closed)
            return 1.0

        class Slow(Counting):
            def step(self, text):
                if where == "step":
                    hang_in(self)
                return super().step(text)

        class Silent(Scripted):
            async def generate(self, *args, **settings):
                pool.begun.set()
                await asyncio.sleep(60)

        engines = EnginePool([Silent([]) if where == "generate" else Scripted(["end"])])
        reward = FunctionReward(lambda played: hang_in(played.env), pool, 5.0) if where == "reward" else None
        player = Player(lambda _: envs.append(Slow()) or envs[-1], renderer, engines, EpisodeLimits(), pool, reward)
        playing = asyncio.create_task(player.play(ticket()))
        await until(pool.begun.is_set)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        if where != "generate":
            assert not envs[0].closed
            pool.release.set()
        await until(lambda: envs[0].closed)
        assert found_closed == ([] if where == "generate" else [False])
        pool.close()

    run(main())


def test_an_episode_that_is_cancelled_while_it_waits_to_close_its_environment_closes_it_once(renderer):
    async def main() -> None:
        pool, closed = Gated(), []

        class Closed(Counting):
            def close(self):
                closed.append(pool.release.is_set())

        async def reward(_: object) -> float:
            pool.run_unwatched(pool.hang, 60.0)  # takes the only thread
            await until(pool.begun.is_set)
            return 1.0

        reward.replaces_turns = True
        player = Player(lambda _: Closed(), renderer, EnginePool([Scripted(["end"])]), EpisodeLimits(), pool, reward)
        playing = asyncio.create_task(player.play(ticket()))
        await until(pool.begun.is_set)
        await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        pool.release.set()
        await until(lambda: closed)
        await pool.run(lambda: None, 5.0)
        assert closed == [True]
        pool.close()

    run(main())


def test_an_environment_that_is_built_too_late_is_closed(renderer):
    async def main() -> None:
        pool, envs = Gated(), []

        def build(_: object) -> Counting:
            pool.hang()
            envs.append(Counting())
            return envs[0]

        player = Player(build, renderer, EnginePool([Scripted([])]), EpisodeLimits(env_timeout_s=0.1), pool)
        assert (await player.play(ticket())).ending is Ending.ENV_TIMEOUT
        pool.release.set()
        await until(lambda: envs and envs[0].closed)
        pool.close()

    run(main())


def test_a_call_that_begins_after_the_episode_was_given_up_does_nothing():
    calls = EnvCalls(lambda: pytest.fail("closed"))
    call = calls.guarded(lambda: pytest.fail("called"))
    assert calls.give_up()
    with pytest.raises(EnvTimeout, match="given up"):
        call()


# ---------------------------------------------------------------------- texts


def test_long_texts_and_more_than_the_last_few_are_not_kept():
    made: list[str] = []
    encode = render.of_short(lambda text: made.append(text) or text)
    long = "x" * (render.KEPT_CHARACTERS + 1)
    for text in ("a", "a", long, long):
        assert encode(text) == text
    assert made == ["a", long, long]
    for number in range(render.KEPT_TEXTS):
        encode(str(number))
    encode("a")
    assert made[-1] == "a"


def test_an_episode_with_unsound_metrics_costs_itself_alone(renderer, threads):
    async def main() -> None:
        async def rollout(context: Any) -> Any:
            good, _ = await asyncio.to_thread(play, renderer, threads, ["end"])
            return replace(good, metrics=None)

        player = Player(Counting, renderer, EnginePool([Scripted([])]), EpisodeLimits(), threads, rollout=rollout)
        trajectory = await player.play(ticket())
        assert trajectory.ending is Ending.ENV_ERROR and "Trajectory without metrics" in trajectory.error

    run(main())
