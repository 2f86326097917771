"""Calls of environments in threads: those that hang cost a thread each until they return, and too many the process."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from actor import env_threads
from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads, EnvTimeout, TooManyHang
from actor.episode import EpisodeLimits
from actor.rewards import FunctionReward
from actor.rollout import Player
from tests.support.actor_rig import Learner, actor_process, give
from tests.support.rollout_rig import Counting, Scripted, renderer, ticket

__all__ = ["renderer"]  # a fixture


def test_calls_that_return_late_are_no_longer_lost() -> None:
    async def main() -> None:
        pool = EnvThreads(1, max_lost=2)
        for _ in range(3):
            release = threading.Event()
            with pytest.raises(EnvTimeout):
                await pool.run(release.wait, 0.3)
            assert pool.num_lost == 1
            release.set()
            while pool.num_lost:
                await asyncio.sleep(0.001)
        assert await pool.run(lambda: 7, 5.0) == 7
        pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_too_many_hanging_calls_end_the_episodes_loop_whatever_it_catches(renderer) -> None:
    release = threading.Event()

    async def main() -> None:
        pool = EnvThreads(1, max_lost=2)
        engines = EnginePool([Scripted(["end"])])
        player = Player(lambda _: release.wait(), renderer, engines, EpisodeLimits(env_timeout_s=0.3), pool)
        try:
            endings = [(await player.play(ticket())).ending for _ in range(2)]
            assert endings == ["env_timeout", "env_timeout"]
            with pytest.raises(TooManyHang, match="3 calls"):
                await player.play(ticket())
        finally:
            release.set()
            pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


HANGS = """
import threading

def build_env(sample=None, args=None, **_):
    threading.Event().wait()
"""


@pytest.mark.slow
def test_an_actor_whose_environments_hang_ends_with_its_reason_and_not_as_the_users_mistake(tmp_path: Path) -> None:
    """A real process. With this exit code its supervisor starts it again."""
    (tmp_path / "hangs.py").write_text(HANGS)
    settings = ("--env.module", str(tmp_path / "hangs.py"), "--env.timeout_s", "0.3", "--env.threads", "8")
    tickets = [ticket(id=str(number), group_size=8) for number in range(20)]
    with closing(Learner()) as learner, actor_process(learner, *settings, "--actor.groups", "1") as process:
        asyncio.run(give(learner, *tickets))
        _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert told.strip().splitlines()[-1] == "error: 65 calls of environments and rewards hang"
    assert "Traceback" not in told


def test_a_thread_that_memory_ran_out_for_is_waited_for_by_nobody_and_replaced_later(monkeypatch) -> None:
    async def main() -> None:
        pool = EnvThreads(1)
        with pytest.raises(EnvTimeout, match="no free thread"):
            await pool.run(lambda: 1, 0.02)
        monkeypatch.undo()
        with pytest.raises(EnvTimeout, match="no free thread"):
            await pool.run(lambda: 1, 0.02)
        assert await pool.run(lambda: 2, 5.0) == 2
        pool.close()

    monkeypatch.setattr(env_threads, "start_thread", lambda function: None)
    asyncio.run(asyncio.wait_for(main(), 60))


def test_calls_that_find_no_thread_do_not_make_the_pool_grow() -> None:
    async def main() -> None:
        pool, free, begun = EnvThreads(1), threading.Event(), threading.Event()
        held = asyncio.create_task(pool.run(lambda: (begun.set(), free.wait()), 30.0))
        await asyncio.to_thread(begun.wait)
        for _ in range(3):
            with pytest.raises(EnvTimeout, match="no free thread"):
                await pool.run(lambda: 1, 0.01)
        assert pool.num_begun == 1
        free.set()
        await held
        pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("where", ["generate", "step", "reward"])
def test_the_environments_of_episodes_that_are_cancelled_at_the_end_are_closed_before_it(renderer, where) -> None:
    envs, begun = [], threading.Semaphore(0)

    def slow(_: object = None) -> float:
        begun.release()
        time.sleep(0.2)
        return 1.0

    class Slow(Counting):
        def step(self, text):
            if where == "step":
                slow()
            return super().step(text)

        def close(self):
            time.sleep(0.02)
            super().close()

    class Silent(Scripted):
        async def generate(self, *args, **settings):
            begun.release()
            await asyncio.sleep(600)

    async def main() -> None:
        pool = EnvThreads(2)
        engines = EnginePool([Silent([]) if where == "generate" else Scripted(["end"] * 4)])
        reward = FunctionReward(slow, pool, 5.0) if where == "reward" else None
        player = Player(lambda _: envs.append(Slow()) or envs[-1], renderer, engines, EpisodeLimits(), pool, reward)
        playing = [asyncio.create_task(player.play(ticket(), index)) for index in range(4)]
        while not begun.acquire(blocking=False):
            await asyncio.sleep(0.001)
        for episode in playing:
            episode.cancel()
        await asyncio.wait(playing)
        await pool.settle(20.0)
        assert envs and all(env.closed for env in envs)
        pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_that_hangs_at_the_end_is_left_behind_and_said(caplog) -> None:
    release = threading.Event()

    async def main() -> None:
        pool = EnvThreads(1)
        pool.run_unwatched(release.wait, 60.0)
        await pool.settle(0.05)
        release.set()
        pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert "1 calls of cancelled episodes go on after 0.05 s and are left behind" in caplog.text
