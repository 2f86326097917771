"""Environments whose functions are coroutines are played as plain ones are, with the same limits and endings."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.rollout import Player
from envs.env_calls import make_env
from shared.types import Ending
from tests.support.rollout_rig import Counting, Scripted, play, renderer, threads, ticket

__all__ = ["renderer", "threads"]  # fixtures
SOON = EpisodeLimits(env_timeout_s=0.3)


class Coroutines(Counting):
    """The same environment; each method waits for the loop once."""

    async def reset(self):
        await asyncio.sleep(0)
        return Counting.reset(self)

    async def step(self, text):
        await asyncio.sleep(0)
        return Counting.step(self, text)

    async def format_observation(self, observation):
        await asyncio.sleep(0)
        return Counting.format_observation(self, observation)

    async def close(self):
        await asyncio.sleep(0)
        self.closed = True


async def built(sample):
    await asyncio.sleep(0)
    return Coroutines(sample)


async def length(env):
    return float(len(env.heard))


def test_an_episode_of_coroutines_is_that_of_plain_functions(renderer, threads):
    answers = ["up", "down", "end"]
    plain, _ = play(renderer, threads, answers, episode_reward=lambda env: len(env.heard))
    other, _ = play(
        renderer,
        threads,
        answers,
        env=lambda sample: make_env(built, sample=sample),
        episode_reward=length,
    )
    assert other.ending is Ending.COMPLETED, other.error
    assert other.token_ids.tolist() == plain.token_ids.tolist()
    assert (other.turns, other.reward) == (plain.turns, plain.reward)


def test_a_coroutine_that_raises_is_an_env_error_with_its_place(renderer, threads):
    class Raises(Coroutines):
        async def step(self, text):
            await asyncio.sleep(0)
            raise KeyError(text)

    trajectory, _ = play(renderer, threads, ["up"], env=Raises)
    assert trajectory.ending is Ending.ENV_ERROR
    assert "KeyError: 'up' (tests/actor/test_async_envs.py:" in trajectory.error


def test_an_await_that_never_ends_is_an_env_timeout_and_gives_its_thread_back(renderer, threads):
    made = []

    class Waits(Coroutines):
        def __init__(self, sample):
            super().__init__(sample)
            made.append(self)

        async def step(self, text):
            await asyncio.Event().wait()

    trajectory, _ = play(renderer, threads, ["up"], env=Waits, limits=SOON)
    assert trajectory.ending is Ending.ENV_TIMEOUT
    deadline = time.monotonic() + 60
    while threads.num_lost or not made[0].closed:
        assert time.monotonic() < deadline, (threads.num_lost, made[0].closed)
        time.sleep(0.001)


def test_a_coroutine_that_blocks_its_loop_hurts_no_other_environment(renderer, threads):
    release, begun = threading.Event(), threading.Event()

    class Blocks(Coroutines):
        async def step(self, text):
            begun.set()
            release.wait()
            return Counting.step(self, text)

    async def main():
        def player(env, answers):
            return Player(env, renderer, EnginePool([Scripted(answers)]), EpisodeLimits(), threads)

        blocked = asyncio.create_task(player(Blocks, ["end"]).play(ticket()))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        other = await asyncio.wait_for(player(Coroutines, ["up", "end"]).play(ticket()), 60)
        assert other.ending is Ending.COMPLETED and not blocked.done()
        release.set()
        return await asyncio.wait_for(blocked, 60)

    assert asyncio.run(main()).ending is Ending.COMPLETED


@pytest.mark.parametrize("method", ["reset", "close"])
def test_a_given_up_coroutine_closes_its_loop(renderer, threads, method):
    loops = []

    class Stays(Coroutines):
        async def reset(self):
            loops.append(asyncio.get_running_loop())
            return Counting.reset(self)

    async def waits(self):
        loops.append(asyncio.get_running_loop())
        await asyncio.Event().wait()

    setattr(Stays, method, waits)
    trajectory, _ = play(renderer, threads, ["end"], env=Stays, limits=SOON)
    assert trajectory.ending is (Ending.ENV_TIMEOUT if method == "reset" else Ending.COMPLETED)
    deadline = time.monotonic() + 60
    while not loops[0].is_closed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
